mod checkpoint;
