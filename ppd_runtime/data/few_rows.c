/* y = x W^T + bias for a few rows x, reading W from memory once.
 *
 * A decoding step multiplies every weight matrix with 1 to about 16 rows. Such a product is bound by memory: W is read
 * once, at a few floating-point operations a value. BLAS libraries pack W first or read it several times, which costs
 * up to twice the time of one row. Here BLOCK outputs (rows of W, as they lie in memory) meet TILE rows of x at a time:
 * the sums stay in registers, x stays in the first-level cache, and the next block of W is prefetched while this one
 * is used. Sums are float32 whatever the type of W, in another order than the library's: equal up to rounding.
 *
 * GCC and Clang vector extensions only, so that the same source serves every instruction set.
 */
#include <stdint.h>

#if defined(__AVX512F__)   /* 32 registers of 16 floats */
#define LANES 16
#define TILE 8
#define BLOCK 3
#elif defined(__AVX2__)    /* 16 registers of 8 floats */
#define LANES 8
#define TILE 4
#define BLOCK 3
#else                      /* NEON: 32 registers of 4 floats */
#define LANES 4
#define TILE 4
#define BLOCK 4
#endif

#define UNROLL _Pragma("GCC unroll 16")

typedef float floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef _Float16 float16s __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint16_t bfloat16;

static inline floats load_float(const float *p) { return *(const floats *)p; }
static inline floats load__Float16(const _Float16 *p) { return __builtin_convertvector(*(const float16s *)p, floats); }
/* A bfloat16 is the upper half of a float. */
static inline floats load_bfloat16(const bfloat16 *p) {
    return (floats)(__builtin_convertvector(*(const halves *)p, words) << 16);
}
static inline float one_float(const float *p) { return *p; }
static inline float one__Float16(const _Float16 *p) { return (float)*p; }
static inline float one_bfloat16(const bfloat16 *p) {
    union { uint32_t bits; float value; } u = {(uint32_t)*p << 16};
    return u.value;
}

static inline float total(floats v) {
    /* Fold halves: lanes i and i + width. A loop over the lanes would cost as much as the products. */
    typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));
    const quad *part = (const quad *)&v;
    quad sum = part[0];
    UNROLL for (int i = 1; i < LANES / 4; i++) sum += part[i];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/* R rows of x times B outputs. The sums are an array that the unrolled loops turn into registers. */
#define DEFINE_KERNEL(W, R, B)                                                                                 \
    static void kernel_##W##_##R##_##B(const W *w, const float *x, float *y, const float *bias, int64_t width, \
                                       int64_t outputs) {                                                      \
        floats sum[R][B];                                                                                      \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int b = 0; b < B; b++) sum[r][b] = (floats){0};         \
        int64_t k = 0;                                                                                         \
        for (; k + LANES <= width; k += LANES) {                                                               \
            floats a[B];                                                                                       \
            UNROLL for (int b = 0; b < B; b++) {                                                               \
                a[b] = load_##W(w + b * width + k);                                                            \
                __builtin_prefetch(w + (b + B) * width + k);                                                   \
            }                                                                                                  \
            UNROLL for (int r = 0; r < R; r++) {                                                               \
                floats c = load_float(x + r * width + k);                                                      \
                UNROLL for (int b = 0; b < B; b++) sum[r][b] += a[b] * c;                                      \
            }                                                                                                  \
        }                                                                                                      \
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int b = 0; b < B; b++) {                                \
            float s = total(sum[r][b]);                                                                        \
            for (int64_t i = k; i < width; i++) s += one_##W(w + b * width + i) * x[r * width + i];            \
            y[r * outputs + b] = s + (bias ? bias[b] : 0);                                                     \
        }                                                                                                      \
    }

#define CALL(W, R, B)                                                     \
    case R:                                                               \
        kernel_##W##_##R##_##B(w, x, y, bias, width, outputs);            \
        break;

#if TILE == 8
#define FOR_ROWS(DO, W, B) DO(W, 1, B) DO(W, 2, B) DO(W, 3, B) DO(W, 4, B) DO(W, 5, B) DO(W, 6, B) DO(W, 7, B) DO(W, 8, B)
#else
#define FOR_ROWS(DO, W, B) DO(W, 1, B) DO(W, 2, B) DO(W, 3, B) DO(W, 4, B)
#endif
/* A macro argument is expanded before use, so that BLOCK pastes as its number. */
#define FOR_BLOCK(DO, W, B) FOR_ROWS(DO, W, B)

#define DEFINE_LINEAR(W)                                                                                        \
    FOR_BLOCK(DEFINE_KERNEL, W, BLOCK)                                                                          \
    FOR_BLOCK(DEFINE_KERNEL, W, 1)                                                                              \
    static void block_##W(int64_t rows, const W *w, const float *x, float *y, const float *bias, int64_t width, \
                          int64_t outputs) {                                                                    \
        switch (rows) { FOR_BLOCK(CALL, W, BLOCK) }                                                             \
    }                                                                                                           \
    static void single_##W(int64_t rows, const W *w, const float *x, float *y, const float *bias, int64_t width, \
                           int64_t outputs) {                                                                   \
        switch (rows) { FOR_BLOCK(CALL, W, 1) }                                                                 \
    }                                                                                                           \
    /* x (rows, width), w (outputs, width), bias (outputs) or 0, y (rows, outputs); all contiguous. */          \
    void linear_##W(const float *x, const W *w, const float *bias, float *y, int64_t rows, int64_t width,       \
                    int64_t outputs, int threads) {                                                             \
        int64_t num_blocks = (outputs + BLOCK - 1) / BLOCK;                                                     \
        _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")                      \
        for (int64_t i = 0; i < num_blocks; i++) {                                                              \
            int64_t first = i * BLOCK, last = first + BLOCK;                                                    \
            for (int64_t r = 0; r < rows; r += TILE) {                                                          \
                int64_t count = rows - r < TILE ? rows - r : TILE;                                              \
                const float *xr = x + r * width;                                                                \
                float *yr = y + r * outputs;                                                                    \
                if (last <= outputs)                                                                            \
                    block_##W(count, w + first * width, xr, yr + first, bias ? bias + first : 0, width, outputs); \
                else                                                                                            \
                    for (int64_t o = first; o < outputs; o++)                                                   \
                        single_##W(count, w + o * width, xr, yr + o, bias ? bias + o : 0, width, outputs);      \
            }                                                                                                   \
        }                                                                                                       \
    }

DEFINE_LINEAR(float)
DEFINE_LINEAR(_Float16)
DEFINE_LINEAR(bfloat16)
