//! Captures of one engine while others open and close the card: what waits for the whole card ends every capture on it.

use std::sync::atomic::{AtomicUsize, Ordering};

use highwater::device::{Device, cards};
use highwater::num::DType;
use highwater::ops::launch::stream;

use super::{Pair, Where, place};
use crate::ops::{numerics, tensor};

#[test]
fn devices_that_come_and_go_end_no_capture() {
    /// Threads that open and close a device, and how often each.
    const OTHERS: usize = 2;
    const TIMES: usize = 8;
    const LAUNCHES: usize = 200;
    let Some(pair) = Pair::new("captures", numerics(DType::Bf16, DType::F32), 1 << 10) else { return };
    let others = if place() == Where::Card { OTHERS } else { 0 };
    let (cx, ended) = (pair.cuda.cx(), AtomicUsize::new(0));
    let values: Vec<f32> = (0..1024).map(|i| i as f32).collect();
    let x = tensor(&cx, DType::F32, &[1024], &values);
    let mut y = tensor(&cx, DType::F32, &[1024], &[0.0; 1024]);
    let cuda = pair.cuda.device.as_cuda().unwrap();
    let mut captured = 0;
    std::thread::scope(|scope| {
        for _ in 0..others {
            scope.spawn(|| {
                for _ in 0..TIMES {
                    drop(Device::cuda(cards::find("h200").unwrap(), 0, 16 << 20).unwrap());
                }
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }
        while captured == 0 || ended.load(Ordering::Relaxed) < others {
            let body = || (0..LAUNCHES).try_for_each(|_| stream::copy(&pair.cuda.device, &x, &mut y));
            let graph = cuda.capture(body).unwrap();
            cuda.replay(&graph).unwrap();
            captured += 1;
        }
    });
    assert_eq!(y.buffer().read::<f32>(0, 1024).unwrap(), values, "after {captured} captures");
}
