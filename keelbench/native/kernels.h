/* Shared by the kernels. Compiled once per machine with -DREAL=float or double.
 *
 * Arrays are contiguous. A lane (and a sequence) is computed alone and in one order, so its
 * bits do not depend on its neighbours. NaN and inf pass through: a run that has diverged
 * must show it. Letters: S lanes, N tokens, C channels, D width, F hidden, B sequences,
 * T time, H query heads, G KV heads, K head dimension, V vocabulary.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Tokens that go through a sub-layer at a time. Forward, few enough that what lies between two
 * matrix products is still in cache; backward, more, since weight gradients are sums over
 * tokens, and BLAS is faster at one long sum than at adding up short ones. Measured. */
enum { FORWARD_TOKENS = 128, BACKWARD_TOKENS = 512 };

enum { STRIP = 16 };
static inline long least(long a, long b) { return a < b ? a : b; }
/* Rounded up to whole strips: queries that attention takes at a time. */
static inline long padded(long n) { return (n + STRIP - 1) / STRIP * STRIP; }

/* exp without branches, so that loops over it vectorise: 2^n times a polynomial (Cephes).
 * Saturates to 0 and inf; NaN stays NaN. */
static inline float exp_float(float x) {
    x = -104.0f > x ? -104.0f : x;
    x = 89.0f < x ? 89.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (int32_t)n;
    power = power < -127 ? -127 : power;
    union { int32_t bits; float value; } two = {.bits = (power + 127) << 23};
    return p * two.value;
}

static inline REAL fast_exp(REAL x) {
    return sizeof(REAL) == 4 ? (REAL)exp_float((float)x) : (REAL)exp((double)x);
}

/* Scratch memory of this thread and source file, kept between calls; NULL if there is none. */
static inline REAL *scratch(size_t count) {
    static _Thread_local REAL *kept = NULL;
    static _Thread_local size_t size = 0;
    if (count > size) {
        free(kept);
        kept = aligned_alloc(64, (count * sizeof(REAL) + 63) / 64 * 64);
        size = kept ? count : 0;
    }
    return kept;
}

/* Gains of the norms per head of q, k and v, K each; NULL where a kind has none. */
typedef struct {
    REAL *of[3];
    long H, G, K;
    double eps;
} Gains;

enum { PLAIN, TURNED };
void multiply(int m, int n, int k, const REAL *a, int a_is, const REAL *b, int b_is, REAL *c,
              int is_sum);
void rms_forward(const REAL *x, const REAL *gain, REAL *out, REAL *inverse, long S, long N,
                 long C, long lane, double eps);
void rms_backward(const REAL *grad, const REAL *x, const REAL *gain, const REAL *inverse,
                  REAL *dx, REAL *dgain, long S, long N, long C, long lane, long is_sum);
int ffn_forward(const REAL *x, const REAL *gate_up, const REAL *down, REAL *hidden, REAL *y,
                long S, long N, long D, long F, long gate_up_lane, long down_lane);
int ffn_backward(const REAL *grad, const REAL *x, const REAL *gate_up, const REAL *down,
                 const REAL *hidden, REAL *dx, REAL *dgate_up, REAL *ddown, long S, long N,
                 long D, long F, long gate_up_lane, long down_lane, long dx_sum, long w_sum);
int attend_forward(const REAL *qkv, const REAL *turn, REAL *y, REAL *softmax, long B, long T,
                   long H, long G, long K);
int attend_backward(const REAL *grad, const REAL *qkv, const REAL *turn, const REAL *y,
                    const REAL *softmax, REAL *grad_qkv, long B, long T, long H, long G,
                    long K);
int attention_forward(const REAL *x, const REAL *qkv_weight, const REAL *out_weight,
                      Gains gains, const REAL *turn, REAL *qkv, REAL *y, REAL *softmax,
                      REAL *result, long S, long B, long T, long D, long lane);
int attention_backward(const REAL *grad, const REAL *x, const REAL *qkv_weight,
                       const REAL *out_weight, Gains gains, const REAL *turn,
                       const REAL *qkv, const REAL *y, const REAL *softmax, REAL *dx,
                       REAL *dqkv_weight, REAL *dout_weight, Gains dgains, long S, long B,
                       long T, long D, long lane, long dx_sum, long w_sum);
double cross_entropy(REAL *logits, const int64_t *tokens, long B, long T, long V);
