//! The one test binary, a module per room.

mod mem;
