// Hopper's own instructions: barriers that count bytes, the tensor copy engine, and matrix products of four warps. They
// exist for sm_90a alone; nothing here is emulated.
#ifndef LIB_HOPPER
#define LIB_HOPPER
#include "lib/ptx.cuh"

#if !defined(HIGHWATER_EMULATE) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_HOPPER 1

// A tensor's address, extents, box and swizzle as the copy engine reads them; made by the driver.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

DEVICE void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives, and has the phase wait for so many bytes of copies too.
DEVICE void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Waits for the end of the phase of this parity.
DEVICE void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// A box of a two-dimensional tensor to shared memory: `column` in elements, `row`; rows and columns outside are zeros.
DEVICE void copy_box(void* shared, const TensorMap* map, uint64_t* barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

template <int REGISTERS>
DEVICE void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
DEVICE void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Rows of 128 bytes, swizzled in groups of eight rows, the first at a multiple of 1024: how a product finds its operand.
DEVICE uint64_t operand_rows128(const void* shared) {
  uint64_t address = shared_address(shared);
  constexpr uint64_t BETWEEN_GROUPS = 1024 >> 4, SWIZZLE_128 = 1;
  return (address & 0x3FFFFu) >> 4 | uint64_t(1) << 16 | BETWEEN_GROUPS << 32 | SWIZZLE_128 << 62;
}

DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// A barrier of 128 threads; numbers from 1 on, 0 is __syncthreads.
DEVICE void group_barrier(int number) { asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory"); }

// Two neighbouring floats of shared memory, read where they are written down: early reads would hold registers.
DEVICE void read_pair(const float* shared, float& a, float& b) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(shared_address(shared)) : "memory");
}

// Four 8x8 matrices of 16-bit elements, each lane's pairs as ldmatrix_x4 gives them, stored transposed: lane l gives the
// address of column l % 8 of matrix l / 8 (16 bytes, aligned).
DEVICE void stmatrix_x4_trans(void* column, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared_address(column)), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// A tile of two dimensions.
struct Place {
  int i, j;
};

// Tile number `id` where `height` tiles along i are taken together, so that one wave of blocks shares both operands in L2.
DEVICE Place place(int id, int height, int tiles_i, int tiles_j) {
  int per_group = height * tiles_j;
  int group = id / per_group, rest = id % per_group;
  int first = group * height, here = min(tiles_i - first, height);
  return Place{first + rest % here, rest / here};
}

// The names of the first so many operands, and sums from the i-th on as operands.
#define HW_N4 "%0,%1,%2,%3"
#define HW_N8 HW_N4 ",%4,%5,%6,%7"
#define HW_N16 HW_N8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define HW_N24 HW_N16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define HW_N32 HW_N24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define HW_N40 HW_N32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define HW_N48 HW_N40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define HW_N56 HW_N48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define HW_N64 HW_N56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define HW_N72 HW_N64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define HW_N80 HW_N72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define HW_N88 HW_N80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define HW_N96 HW_N88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define HW_N104 HW_N96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define HW_N112 HW_N104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define HW_N120 HW_N112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define HW_N128 HW_N120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define HW_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define HW_D64(i) HW_D8(i), HW_D8(i + 8), HW_D8(i + 16), HW_D8(i + 24), HW_D8(i + 32), HW_D8(i + 40), HW_D8(i + 48), HW_D8(i + 56)

// d += a b: a 64 rows and b N columns of 32 e4m3, both from shared memory; four warps together. `keep` 0 starts from zero.
// d[4 j + 0, 1] = row 16 warp + lane / 4, columns 8 j + 2 (lane % 4) and the next; d[4 j + 2, 3] = eight rows below.
DEVICE void product_e4m3(float (&d)[128], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" HW_N128 "}, %128, %129, p, 1, 1;\n}\n"
      : HW_D64(0), HW_D64(64)
      : "l"(a), "l"(b), "r"(keep));
}

DEVICE void product_e4m3(float (&d)[64], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" HW_N64 "}, %64, %65, p, 1, 1;\n}\n"
      : HW_D64(0)
      : "l"(a), "l"(b), "r"(keep));
}

DEVICE void product_e4m3(float (&d)[32], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" HW_N32 "}, %32, %33, p, 1, 1;\n}\n"
      : HW_D8(0), HW_D8(8), HW_D8(16), HW_D8(24)
      : "l"(a), "l"(b), "r"(keep));
}

DEVICE void product_e4m3(float (&d)[16], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {" HW_N16 "}, %16, %17, p, 1, 1;\n}\n"
      : HW_D8(0), HW_D8(8)
      : "l"(a), "l"(b), "r"(keep));
}

DEVICE void product_e4m3(float (&d)[8], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {" HW_N8 "}, %8, %9, p, 1, 1;\n}\n"
      : HW_D8(0)
      : "l"(a), "l"(b), "r"(keep));
}

DEVICE void product_e4m3(float (&d)[4], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {" HW_N4 "}, %4, %5, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a), "l"(b), "r"(keep));
}

// d += a b: a 64 rows of 16 bf16 from registers, b N columns of them from shared memory; four warps together. d as
// product_e4m3 has it; a as the a of mma_bf16, its 16 rows those of the warp. `a` must stay as it is until the product is done.
DEVICE void product_bf16(float (&d)[128], const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" HW_N128 "}, {%128,%129,%130,%131}, %132, p, 1, 1, 0;\n}\n"
      : HW_D64(0), HW_D64(64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

DEVICE void product_bf16(float (&d)[96], const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %101, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" HW_N96 "}, {%96,%97,%98,%99}, %100, p, 1, 1, 0;\n}\n"
      : HW_D64(0), HW_D8(64), HW_D8(72), HW_D8(80), HW_D8(88)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

DEVICE void product_bf16(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" HW_N64 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}\n"
      : HW_D64(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

#else
#define HAS_HOPPER 0
#endif
#endif
