//! The emulator against plain loops: what kernels rely on a device for, each in a kernel of its own; misuse by name.

use highwater::device::cuda::emulator::{TextArg, run_text, unavailable};
use highwater::error::Error;

use TextArg::{F32, Int, Slot, U16, U32};

/// Whether kernels can be run here; else a printed line, or a failure under `REQUIRE_EMULATOR=1`.
fn runs() -> bool {
    let Some(why) = unavailable() else { return true };
    assert!(std::env::var_os("REQUIRE_EMULATOR").is_none(), "REQUIRE_EMULATOR is set: {why}");
    println!("skipped: {why}");
    false
}

/// A kernel named `f` with these parameters and body.
fn kernel(parameters: &str, body: &str) -> String {
    format!("#include \"lib/ptx.cuh\"\nKERNEL f({parameters}) {{\n{body}\n}}\nEXPORT(f)\n")
}

#[track_caller]
fn run(parameters: &str, body: &str, blocks: u32, threads: u32, shared: u32, args: &mut [TextArg]) {
    run_text(&kernel(parameters, body), "f", [blocks, 1, 1], threads, shared, args).unwrap();
}

/// The sentence a launch fails with.
#[track_caller]
fn fails(parameters: &str, body: &str, threads: u32, shared: u32, args: &mut [TextArg]) -> String {
    match run_text(&kernel(parameters, body), "f", [2, 1, 1], threads, shared, args) {
        Err(Error::Device { what, .. }) => what,
        other => panic!("{other:?} for {body}"),
    }
}

/// A fixed stream of 32-bit words.
struct Words(u64);

impl Words {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// In (-2, 2), with few enough bits for `make` to hold them.
    fn list<T>(&mut self, count: usize, make: impl Fn(f32) -> T) -> Vec<T> {
        (0..count).map(|_| make((self.next() % 1024) as f32 / 256.0 - 2.0)).collect()
    }
}

#[test]
fn shuffles_and_votes_are_those_of_a_warp() {
    if !runs() {
        return;
    }
    let body = "
        unsigned lane = threadIdx.x & 31, at = blockIdx.x * blockDim.x + threadIdx.x, x = 3 * at + 1;
        unsigned* o = out + at * 16;
        o[0] = __shfl_sync(ALL_LANES, x, (lane * 7 + 3) & 31);
        o[1] = __shfl_xor_sync(ALL_LANES, x, 5);
        o[2] = __shfl_up_sync(ALL_LANES, x, 3);
        o[3] = __shfl_down_sync(ALL_LANES, x, 3);
        o[4] = __shfl_sync(ALL_LANES, x, 9, 8);
        o[5] = __shfl_down_sync(ALL_LANES, x, 2, 8);
        o[6] = unsigned(__shfl_xor_sync(ALL_LANES, uint64_t(x) << 32, 1) >> 32);
        o[7] = __ballot_sync(ALL_LANES, x % 3 == 1 && lane % 5 == 0);
        o[8] = __any_sync(ALL_LANES, lane == 40) * 2 + __all_sync(ALL_LANES, lane < 32);
        o[9] = __match_any_sync(ALL_LANES, lane / 6);
        o[10] = __reduce_add_sync(ALL_LANES, x) + __reduce_max_sync(ALL_LANES, x);
        o[11] = unsigned(__reduce_min_sync(ALL_LANES, int(lane) - 4));
        // Two halves that do different things, at different times.
        if (lane < 16) { o[12] = __shfl_sync(0xFFFFu, x, 15); __syncwarp(0xFFFFu); o[13] = __shfl_sync(0xFFFFu, x, 2); }
        else { o[12] = __ballot_sync(0xFFFF0000u, lane & 1); o[13] = 7; }
        o[14] = __float_as_uint(__shfl_xor_sync(ALL_LANES, float(lane), 16));
        // Lanes that have returned count as arrived.
        if (lane >= 20) { o[15] = 0; return; }
        o[15] = __shfl_sync(ALL_LANES, x, 19 - lane);";
    let (blocks, threads) = (3u32, 96u32);
    let mut out = vec![0u32; (blocks * threads * 16) as usize];
    run("unsigned* out", body, blocks, threads, 0, &mut [U32(&mut out)]);
    for at in 0..blocks * threads {
        let (lane, first) = (at % 32, at / 32 * 32);
        let x = |lane: u32| 3 * (first + lane) + 1;
        let group: u32 = (0..32).filter(|l| l / 6 == lane / 6).map(|l| 1 << l).sum();
        let fifths: u32 = (0..32).filter(|l| l % 5 == 0).map(|l| 1 << l).sum();
        let want = [
            x((lane * 7 + 3) % 32),
            x(lane ^ 5),
            x(if lane < 3 { lane } else { lane - 3 }),
            x(if lane > 28 { lane } else { lane + 3 }),
            x(lane / 8 * 8 + 1),
            x(if lane % 8 > 5 { lane } else { lane + 2 }),
            x(lane ^ 1),
            fifths,
            1,
            group,
            (0..32).map(x).sum::<u32>() + x(31),
            (-4i32) as u32,
            if lane < 16 { x(15) } else { 0xAAAA_0000 },
            if lane < 16 { x(2) } else { 7 },
            ((lane ^ 16) as f32).to_bits(),
            if lane < 20 { x(19 - lane) } else { 0 },
        ];
        assert_eq!(out[(at * 16) as usize..][..16], want, "thread {at}");
    }
}

#[test]
fn barriers_hold_for_all_threads_that_are_left() {
    if !runs() {
        return;
    }
    // Neighbours a whole block apart, in blocks of both orders; then half of the threads leave.
    let body = "
        __shared__ unsigned s[200];
        unsigned t = threadIdx.x, n = blockDim.x, x = t;
        for (int i = 0; i < 50; i++) {
          s[t] = x;
          __syncthreads();
          x = s[n - 1 - t] + s[(t + 1) % n];
          __syncthreads();
        }
        unsigned* o = out + (blockIdx.x * n + t) * 4;
        o[0] = x;
        o[1] = __syncthreads_count(t % 3 == 0) * 4 + __syncthreads_or(t == 199) * 2 + __syncthreads_and(t < 199);
        o[2] = o[3] = 0;
        if (t >= 100) return;
        s[t] = t * t;
        __syncthreads();
        o[2] = s[99 - t];
        __syncthreads();
        // Two groups with a barrier each.
        s[t] = t;
        emulate::bar_sync(t < 64 ? 1 : 2, t < 64 ? 64 : 36);
        o[3] = t < 64 ? s[63 - t] : s[163 - t];";
    let (blocks, threads) = (4usize, 200usize);
    let mut out = vec![0u32; blocks * threads * 4];
    run("unsigned* out", body, blocks as u32, threads as u32, 0, &mut [U32(&mut out)]);
    let mut x: Vec<u32> = (0..threads as u32).collect();
    for _ in 0..50 {
        x = (0..threads).map(|t| x[threads - 1 - t].wrapping_add(x[(t + 1) % threads])).collect();
    }
    for at in 0..blocks * threads {
        let t = at % threads;
        let left = |value: usize| if t < 100 { value as u32 } else { 0 };
        let want =
            [x[t], 67 * 4 + 2, left((99 - t.min(99)).pow(2)), left(if t < 64 { 63 - t } else { 163 - t.min(163) })];
        assert_eq!(out[at * 4..][..4], want, "thread {at}");
    }
}

/// C = A B by mma over one tile, operands through shared memory and ldmatrix, against sums in the same order.
fn matrices<T: Copy>(
    name: &str,
    k: usize,
    a: &[u16],
    b: &[u16],
    widen: impl Fn(u16, usize) -> Vec<T>,
    value: impl Fn(T) -> f32,
) {
    // `words` 16-bit elements of a row of A, and of a column of B.
    let words = a.len() / 16;
    let body = format!(
        "__shared__ alignas(16) uint16_t sa[16][{words}];
         __shared__ alignas(16) uint16_t sb[8][{words}];
         unsigned lane = threadIdx.x;
         for (int i = lane; i < 16 * {words}; i += 32) sa[i / {words}][i % {words}] = a[i];
         for (int i = lane; i < 8 * {words}; i += 32) sb[i / {words}][i % {words}] = b[i];
         __syncwarp();
         float d[4] = {{1.0f, 2.0f, 3.0f, 4.0f}};
         for (int k = 0; k < {words}; k += 16) {{
           uint32_t x[4], y[4];
           ldmatrix_x4(x, &sa[lane % 16][k + lane / 16 * 8]);
           // Two matrices of B; the other addresses repeat them.
           ldmatrix_x4(y, &sb[lane % 8][k + lane / 8 % 2 * 8]);
           uint32_t z[2] = {{y[0], y[1]}};
           if (y[0] != y[2]) d[0] = __uint_as_float(0x7FC00000u);
           {name}(d, x, z);
         }}
         for (int i = 0; i < 4; i++) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];"
    );
    let (mut a_in, mut b_in, mut c) = (a.to_vec(), b.to_vec(), vec![0f32; 128]);
    let parameters = "const uint16_t* a, const uint16_t* b, float* c";
    run(parameters, &body, 1, 32, 0, &mut [U16(&mut a_in), U16(&mut b_in), F32(&mut c)]);
    for row in 0..16 {
        for column in 0..8 {
            let start = [1.0, 2.0, 3.0, 4.0][row / 8 * 2 + column % 2];
            let of = |list: &[u16], line: usize| -> Vec<f32> {
                (0..words).flat_map(|i| widen(list[line * words + i], i)).map(&value).collect()
            };
            let (x, y) = (of(a, row), of(b, column));
            assert_eq!(x.len(), k);
            let want = x.iter().zip(&y).fold(start, |sum, (x, y)| sum + x * y);
            let got = c[row * 8 + column];
            assert!(got == want || (got.is_nan() && want.is_nan()), "{name} at {row}, {column}: {got} for {want}");
        }
    }
}

#[test]
fn mma_is_the_sum_of_exact_products_in_order() {
    if !runs() {
        return;
    }
    let mut words = Words(1);
    let (a, b) = (words.list(16 * 64, half::bf16::from_f32), words.list(8 * 64, half::bf16::from_f32));
    let bits = |list: &[half::bf16]| list.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    matrices("mma_bf16", 64, &bits(&a), &bits(&b), |w, _| vec![half::bf16::from_bits(w)], half::bf16::to_f32);

    // Any half: subnormals, infinities and NaN among them.
    let any = |words: &mut Words, count: usize| (0..count).map(|_| words.next() as u16).collect::<Vec<_>>();
    let half = |w: u16, _: usize| vec![half::f16::from_bits(w)];
    for _ in 0..4 {
        let (a, b) = (any(&mut words, 16 * 16), any(&mut words, 8 * 16));
        matrices("mma_f16", 16, &a, &b, half, half::f16::to_f32);
    }
    let (a, b) = (words.list(16 * 64, half::f16::from_f32), words.list(8 * 64, half::f16::from_f32));
    let bits = |list: &[half::f16]| list.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    matrices("mma_f16", 64, &bits(&a), &bits(&b), half, half::f16::to_f32);

    // Any code, but NaN in one column only: elsewhere it would hide everything.
    let code = |word: u32| if word as u8 & 0x7F == 0x7F { 0x38 } else { word as u8 };
    let mut pair = |_: usize| u16::from_le_bytes([code(words.next()), code(words.next())]);
    let (a, mut b): (Vec<u16>, Vec<u16>) =
        ((0..16 * 32).map(&mut pair).collect(), (0..8 * 32).map(&mut pair).collect());
    b[5] = 0x7F12;
    let e4m3 = |w: u16, _: usize| w.to_le_bytes().map(float8::F8E4M3::from_bits).to_vec();
    matrices("mma_e4m3", 64, &a, &b, e4m3, |x| x.to_f32());
}

#[test]
fn ldmatrix_transposes() {
    if !runs() {
        return;
    }
    let body = "
        __shared__ alignas(16) uint16_t s[32][8];
        unsigned lane = threadIdx.x;
        for (int i = 0; i < 8; i++) s[lane][i] = uint16_t(lane * 8 + i);
        __syncwarp();
        uint32_t r[4];
        ldmatrix_x4_trans(r, s[lane]);
        for (int i = 0; i < 8; i++) out[lane * 8 + i] = uint16_t(r[i / 2] >> (16 * (i % 2)));";
    let mut out = vec![0u16; 256];
    run("uint16_t* out", body, 1, 32, 0, &mut [U16(&mut out)]);
    for (at, got) in out.iter().enumerate() {
        let (lane, matrix, odd) = (at / 8, at / 2 % 4, at % 2);
        let (row, column) = (lane % 4 * 2 + odd, lane / 4);
        assert_eq!(usize::from(*got), matrix * 64 + row * 8 + column, "lane {lane}, register {matrix}");
    }
}

#[test]
fn every_code_and_every_bit_intrinsic() {
    if !runs() {
        return;
    }
    let body = "
        unsigned x = threadIdx.x, w = 0x9E3779B9u * (x + 1);
        unsigned* o = out + x * 13;
        o[0] = e4m3x2_to_f16x2(x | (255u - x) << 8);
        o[1] = __float_as_uint(e4m3_to_f32(x));
        o[2] = __popc(w); o[3] = __clz(int(w >> (x & 31))); o[4] = __ffs(int(w)); o[5] = __brev(w);
        o[6] = __umulhi(w, ~w); o[7] = __byte_perm(w, x, 0x5062);
        o[8] = __funnelshift_l(w, x, x); o[9] = __funnelshift_r(w, x, x);
        o[10] = unsigned(__float2int_rn((float(x) - 127.5f) * 3e7f)); o[11] = __float2uint_rz(float(x) - 3.5f);
        o[12] = __float_as_uint(__fmaf_rn(float(w), float(x), 1.0f));";
    let mut out = vec![0u32; 256 * 13];
    run("unsigned* out", body, 1, 256, 0, &mut [U32(&mut out)]);
    for x in 0..256u32 {
        let w = 0x9E37_79B9u32.wrapping_mul(x + 1);
        let code = |x: u32| float8::F8E4M3::from_bits(x as u8).to_f32();
        let got = &out[(x * 13) as usize..][..13];
        for (half, x) in [(got[0] & 0xFFFF, x), (got[0] >> 16, 255 - x)] {
            let half = half::f16::from_bits(half as u16).to_f32();
            assert!(half.to_bits() == code(x).to_bits() || (half.is_nan() && code(x).is_nan()), "code {x}: {half}");
        }
        let f32 = f32::from_bits(got[1]);
        assert!(f32.to_bits() == code(x).to_bits() || (f32.is_nan() && code(x).is_nan()), "code {x}: {f32}");
        let (w_bytes, x_bytes) = (w.to_le_bytes(), x.to_le_bytes());
        let pair = u64::from(x) << 32 | u64::from(w);
        let want = [
            w.count_ones(),
            (w >> (x & 31)).leading_zeros(),
            w.trailing_zeros() + 1,
            w.reverse_bits(),
            (u64::from(w) * u64::from(!w) >> 32) as u32,
            u32::from_le_bytes([w_bytes[2], x_bytes[2], w_bytes[0], x_bytes[1]]),
            (pair << (x & 31) >> 32) as u32,
            (pair >> (x & 31)) as u32,
            ((x as f32 - 127.5) * 3e7).round_ties_even() as i32 as u32,
            (x as f32 - 3.5) as u32,
            (w as f32).mul_add(x as f32, 1.0).to_bits(),
        ];
        assert_eq!(got[2..], want, "{x}");
    }
}

#[test]
fn copies_land_when_they_are_waited_for() {
    if !runs() {
        return;
    }
    // Three groups of one copy each; the third reads 0 bytes, so zeros land.
    let body = "
        DYNAMIC_SHARED(s);
        uint32_t* mine = reinterpret_cast<uint32_t*>(s + threadIdx.x * 48);
        for (int i = 0; i < 12; i++) mine[i] = 1;
        for (int i = 0; i < 3; i++) {
          cp_async16(mine + 4 * i, in + 4 * threadIdx.x, i < 2 ? 16 : 0);
          cp_async_commit();
        }
        uint32_t* o = out + threadIdx.x * 6;
        o[0] = mine[1];
        cp_async_wait<2>();
        o[1] = mine[1]; o[2] = mine[5];
        cp_async_wait<1>();
        o[3] = mine[6]; o[4] = mine[11];
        cp_async_wait<0>();
        o[5] = mine[11];";
    let mut input: Vec<u32> = (0..4 * 64 + 4).map(|i| i * i + 5).collect();
    let aligned = (16 - input.as_ptr() as usize % 16) % 16 / 4;
    let want = input[aligned..].to_vec();
    let address = input[aligned..].as_mut_ptr() as u64;
    let mut out = vec![0u32; 64 * 6];
    run("const uint32_t* in, uint32_t* out", body, 1, 64, 64 * 48, &mut [Slot(address), U32(&mut out)]);
    for t in 0..64 {
        let (second, third) = (want[4 * t + 1], want[4 * t + 2]);
        assert_eq!(out[6 * t..][..6], [u32::MAX, second, u32::MAX, third, u32::MAX, 0], "thread {t}");
    }
    let why = fails("uint32_t* in", "DYNAMIC_SHARED(s); cp_async16(s, in + 1);", 1, 16, &mut [Slot(address)]);
    assert!(why.contains("cp.async") && why.contains("multiples of 16"), "{why}");
}

#[test]
fn shared_memory_holds_nan_until_it_is_written() {
    if !runs() {
        return;
    }
    let body = "
        DYNAMIC_SHARED(s);
        __shared__ float t[64];
        float* d = reinterpret_cast<float*>(s);
        out[blockIdx.x * 64 + threadIdx.x] = __float_as_uint(d[threadIdx.x]) & __float_as_uint(t[threadIdx.x]);
        d[threadIdx.x] = t[threadIdx.x] = 1.0f;";
    let mut out = vec![0u32; 50 * 64];
    run("unsigned* out", body, 50, 64, 256, &mut [U32(&mut out)]);
    assert!(out.iter().all(|x| *x == u32::MAX), "{out:?}");
}

#[test]
fn atomics_of_many_blocks_lose_nothing() {
    if !runs() {
        return;
    }
    let body = "
        unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
        unsigned old = atomicAdd(&out[0], 1);
        atomicOr(&out[8 + old / 32], 1u << (old % 32));
        atomicMax(&out[1], at);
        atomicMin(&out[2], at + 5);
        atomicAdd(reinterpret_cast<unsigned long long*>(&out[4]), 0x100000001ull);
        atomicInc(&out[6], 99);
        for (unsigned seen = out[7], was; (was = atomicCAS(&out[7], seen, seen + 3)) != seen; seen = was) {}
        // The last block of the grid sees what all others wrote.
        __threadfence();
        __syncthreads();
        __shared__ unsigned last;
        if (threadIdx.x == 0) last = atomicAdd(&out[3], 1) == gridDim.x - 1;
        __syncthreads();
        if (last && threadIdx.x == 0) out[3] = out[0];";
    let (blocks, threads) = (500u32, 64u32);
    let count = blocks * threads;
    let mut out = vec![0u32; 8 + count as usize / 32];
    out[2] = u32::MAX;
    run("unsigned* out", body, blocks, threads, 0, &mut [U32(&mut out)]);
    assert_eq!(out[..8], [count, count - 1, 5, count, count, count, count % 100, 3 * count]);
    assert!(out[8..].iter().all(|x| *x == u32::MAX));
}

#[test]
fn every_block_of_a_grid_runs_once() {
    if !runs() {
        return;
    }
    let body = "
        if (threadIdx.x < blockDim.x - 1) return;
        unsigned at = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        atomicAdd(&out[at], blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z);";
    let source = kernel("unsigned* out", body);
    for threads in [1, 33, 1024] {
        let mut out = vec![1000u32; 7 * 5 * 3];
        run_text(&source, "f", [7, 5, 3], threads, 0, &mut [U32(&mut out)]).unwrap();
        for (at, got) in out.iter().enumerate() {
            assert_eq!(*got as usize, 1000 + at % 7 + at / 7 % 5 * 10 + at / 35 * 100);
        }
    }
}

#[test]
fn waiting_for_each_other_is_an_error_that_says_where() {
    if !runs() {
        return;
    }
    let body = "if (threadIdx.x < 16) __syncthreads(); else __shfl_xor_sync(ALL_LANES, 1, 1);";
    let why = fails("", body, 40, 0, &mut []);
    assert!(why.contains("kernel f, block (") && why.contains("deadlock: of 40 threads 8 have returned"), "{why}");
    assert!(
        why.contains("16 wait at __syncthreads; lanes 0xffff0000 of warp 0 wait at __shfl_sync with mask 0xffffffff"),
        "{why}"
    );

    let why = fails("", "emulate::bar_sync(3, 64);", 32, 0, &mut []);
    assert!(why.contains("32 wait at barrier 3 for 64"), "{why}");
    let why = fails("", "__shfl_sync(1u << ((threadIdx.x + 1) & 31), 1, 0);", 32, 0, &mut []);
    assert!(why.contains("leaves out lane"), "{why}");
    let why =
        fails("", "uint32_t a[4]{}, b[2]{}; float d[4]; if (threadIdx.x < 31) mma_bf16(d, a, b);", 32, 0, &mut []);
    assert!(why.contains("all 32 must take part"), "{why}");
}

#[test]
fn bad_addresses_and_arguments_are_errors_and_the_next_launch_runs() {
    if !runs() {
        return;
    }
    let mut out = vec![0u32; 32];
    for _ in 0..3 {
        let why = fails("unsigned* p", "p[threadIdx.x] = 1;", 32, 0, &mut [Slot(64)]);
        // The first thread of the block that failed first: the second block's first is its last.
        let first =
            ["block (0, 0, 0), thread 0: nothing is mapped at the address 0x40", "block (1, 0, 0), thread 31: "];
        assert!(first.iter().any(|text| why.contains(text)), "{why}");
        let why = fails("unsigned* p", "store16(p + 1, load16(p));", 1, 0, &mut [U32(&mut out)]);
        assert!(why.contains("misaligned"), "{why}");
        let why = fails("int n, int* p", "*p = 7 / n;", 1, 0, &mut [Int(0), U32(&mut out)]);
        assert!(why.contains("division by zero"), "{why}");
        let deep = "volatile char a[4096]; struct R { static int f(int n) { volatile char a[4096]; a[n & 4095] = n; \
                    return n == 0 ? a[0] : f(n - 1) + a[n & 4095]; } }; *p = R::f(1000);";
        let why = fails("int* p", deep, 2, 0, &mut [U32(&mut out)]);
        assert!(why.contains("stack"), "{why}");
        let why = fails("", "DYNAMIC_SHARED(s); s[100 + threadIdx.x] = 1;", 2, 101, &mut []);
        assert!(why.contains("outside its 101 bytes of dynamic shared memory"), "{why}");
        let why = fails("int* p, int n", "", 1, 0, &mut [U32(&mut out)]);
        assert!(why.contains("1 arguments for a kernel that takes 2"), "{why}");
        let why = fails("int n", "", 1, 0, &mut [U32(&mut out)]);
        assert!(why.contains("argument 0 has 4 bytes"), "{why}");
        let why = fails("", "", 1025, 0, &mut []);
        assert!(why.contains("1025 threads cannot be launched"), "{why}");
        run("unsigned* p", "p[threadIdx.x] = threadIdx.x;", 1, 32, 0, &mut [U32(&mut out)]);
        assert_eq!(out, (0..32).collect::<Vec<_>>());
    }
}

#[test]
fn what_the_compiler_says_reaches_the_user() {
    if !runs() {
        return;
    }
    let source = kernel("", "no_such_function();");
    let why = run_text(&source, "f", [1, 1, 1], 1, 0, &mut []).unwrap_err().to_string();
    assert!(why.contains("no_such_function") && why.contains("text.cu"), "{why}");
    let why = run_text(&kernel("", ""), "g", [1, 1, 1], 1, 0, &mut []).unwrap_err().to_string();
    assert!(why.contains("text.cu has no g"), "{why}");
}

#[test]
fn a_wait_between_threads_by_polling_ends() {
    if !runs() {
        return;
    }
    // The first thread waits for the last, in blocks of both orders.
    let body = "
        __shared__ volatile unsigned flag;
        if (threadIdx.x == 0) flag = 0;
        __syncthreads();
        if (threadIdx.x == 0) while (flag == 0) __nanosleep(20);
        if (threadIdx.x == blockDim.x - 1) flag = 1;
        out[blockIdx.x * blockDim.x + threadIdx.x] = flag;";
    let mut out = vec![0u32; 4 * 70];
    run("unsigned* out", body, 4, 70, 0, &mut [U32(&mut out)]);
    assert_eq!((out[0], out[70], out[69]), (1, 1, 1));
}
