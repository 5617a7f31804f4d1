mod checkpoint;
mod ops;
