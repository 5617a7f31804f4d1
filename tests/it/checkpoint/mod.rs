//! `highwater::checkpoint`: geometries, configs, and checkpoints on disk, valid and malformed.

mod geometry;
