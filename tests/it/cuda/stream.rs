//! The measuring kernels: a read has seen every word, a copy has moved every word.

use highwater::mem::{End, Layer, Tag};
use highwater::num::DType;
use highwater::ops::Numerics;
use highwater::ops::launch::stream;
use highwater::tensor::{Tensor, byte_size};
use rand::RngExt;

use super::Pair;
use crate::ops::rng;

#[test]
fn reads_see_and_copies_move_every_word() {
    // One vector; less than, exactly and just over a block's tile; more than all resident blocks read at once.
    for vectors in [1usize, 255, 2048, 2049, 132 * 8 * 2048 + 3] {
        let Some(pair) = Pair::new("stream", Numerics::F32, vectors as u64 * 4) else { continue };
        let device = &pair.cuda.device;
        let tensor = |name, len: usize| {
            let buffer = device.alloc(
                End::Arena,
                Tag::new(Layer::Other, "stream", name),
                byte_size(DType::I32, &[len]).unwrap(),
            );
            Tensor::new(buffer.unwrap(), DType::I32, &[len]).unwrap()
        };
        let mut random = rng(vectors as u64);
        let words: Vec<i32> = (0..vectors * 4).map(|_| random.random()).collect();
        let (mut x, mut y) = (tensor("x", words.len()), tensor("y", words.len()));
        x.write(0, &words).unwrap();
        let blocks = stream::blocks(device, x.bytes()) as usize;
        let mut fold = tensor("fold", blocks);
        stream::read(device, &x, &mut fold).unwrap();
        stream::copy(device, &x, &mut y).unwrap();
        let folded = fold.read::<i32>().unwrap().iter().fold(0, |a, b| a ^ b);
        assert_eq!(folded, words.iter().fold(0, |a, b| a ^ b), "{vectors} vectors");
        assert_eq!(y.read::<i32>().unwrap(), words, "{vectors} vectors");
        assert!(stream::read(device, &x, &mut tensor("short", 0)).is_err());
        assert!(stream::copy(device, &x, &mut tensor("short", words.len() + 4)).is_err());
        drop((x, y, fold));
        assert!(device.take_overruns().is_empty());
    }
}
