//! The CPU arm of each op, same stem: plain loops with a written summation order.
