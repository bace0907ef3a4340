/* Norm, feed-forward and loss.
 *
 * Tokens go through a sub-layer in chunks, so that what lies between two matrix products is
 * still in cache. Weights and their gradients lie in one row per lane: ``lane`` is the step
 * from one to the next.
 */
#include "kernels.h"

typedef void Gemm(const char *, const char *, const int *, const int *, const int *,
                  const REAL *, const REAL *, const int *, const REAL *, const int *,
                  const REAL *, REAL *, const int *);
static Gemm *gemm;
void use_gemm(Gemm *blas) { gemm = blas; }

/* c (m, n) = a (m, k) b (k, n), or c += if is_sum; row-major, without gaps. TURNED: the
 * matrix is stored transposed. BLAS is column-major, so it computes c^T = b^T a^T. */
void multiply(int m, int n, int k, const REAL *a, int a_is, const REAL *b, int b_is, REAL *c,
              int is_sum) {
    REAL one = 1, beta = is_sum;
    int lda = a_is == TURNED ? m : k, ldb = b_is == TURNED ? k : n;
    gemm(b_is == TURNED ? "T" : "N", a_is == TURNED ? "T" : "N", &n, &m, &k, &one, b, &ldb, a,
         &lda, &beta, c, &n);
}

static inline void rms_row(const REAL *x, const REAL *gain, REAL *out, REAL *inverse, long C,
                           double eps) {
    REAL square = 0;
#pragma omp simd reduction(+ : square)
    for (long c = 0; c < C; c++) square += x[c] * x[c];
    REAL scale = *inverse = 1 / (REAL)sqrt((double)(square / C) + eps);
#pragma omp simd
    for (long c = 0; c < C; c++) out[c] = x[c] * scale * gain[c];
}

static inline void rms_row_backward(const REAL *grad, const REAL *x, const REAL *gain,
                                    REAL scale, REAL *dx, REAL *dgain, long C, int is_sum) {
    REAL along = 0;
#pragma omp simd reduction(+ : along)
    for (long c = 0; c < C; c++) {
        REAL part = grad[c] * x[c] * scale;
        dgain[c] += part;
        along += part * gain[c];
    }
    along *= scale / C;
#pragma omp simd
    for (long c = 0; c < C; c++) {
        REAL before = is_sum ? dx[c] : 0;
        dx[c] = before + scale * (grad[c] * gain[c] - x[c] * along);
    }
}

/* out = x * inverse * gain, inverse = 1 / sqrt(mean(x^2) + eps), rows of C channels. */
void rms_forward(const REAL *x, const REAL *gain, REAL *out, REAL *inverse, long S, long N,
                 long C, long lane, double eps) {
    for (long row = 0; row < S * N; row++)
        rms_row(x + row * C, gain + row / N * lane, out + row * C, inverse + row, C, eps);
}

/* Adds to dgain; to dx only if is_sum. */
void rms_backward(const REAL *grad, const REAL *x, const REAL *gain, const REAL *inverse,
                  REAL *dx, REAL *dgain, long S, long N, long C, long lane, long is_sum) {
    for (long row = 0; row < S * N; row++)
        rms_row_backward(grad + row * C, x + row * C, gain + row / N * lane, inverse[row],
                         dx + row * C, dgain + row / N * lane, C, is_sum);
}

/* hidden (N, 2F) holds gate and up; out = silu(gate) * up. */
static void swiglu_forward(const REAL *hidden, REAL *out, long N, long F) {
    for (long n = 0; n < N; n++, hidden += 2 * F, out += F)
#pragma omp simd
        for (long f = 0; f < F; f++)
            out[f] = hidden[f] / (1 + fast_exp(-hidden[f])) * hidden[F + f];
}

/* Also writes the product again: cheaper than keeping it since the forward pass. */
static void swiglu_backward(const REAL *grad, const REAL *hidden, REAL *grad_hidden, REAL *out,
                     long N, long F) {
    for (long n = 0; n < N; n++, grad += F, hidden += 2 * F, grad_hidden += 2 * F, out += F)
#pragma omp simd
        for (long f = 0; f < F; f++) {
            REAL gate = hidden[f], up = hidden[F + f];
            REAL sigmoid = 1 / (1 + fast_exp(-gate)), silu = gate * sigmoid;
            out[f] = silu * up;
            grad_hidden[f] = grad[f] * up * (sigmoid + silu * (1 - sigmoid));
            grad_hidden[F + f] = grad[f] * silu;
        }
}

/* y = (silu(x gate) * (x up)) down of x (S, N, D); gate_up (S, D, 2F), down (S, F, D); keeps
 * hidden = x gate_up (S, N, 2F). */
int ffn_forward(const REAL *x, const REAL *gate_up, const REAL *down, REAL *hidden, REAL *y,
                long S, long N, long D, long F, long gate_up_lane, long down_lane) {
    REAL *product = scratch(FORWARD_TOKENS * F);
    if (!product) return 1;
    for (long s = 0; s < S; s++, gate_up += gate_up_lane, down += down_lane)
        for (long n = 0, rows; n < N; n += rows) {
            rows = least(FORWARD_TOKENS, N - n);
            multiply(rows, 2 * F, D, x, PLAIN, gate_up, PLAIN, hidden, 0);
            swiglu_forward(hidden, product, rows, F);
            multiply(rows, D, F, product, PLAIN, down, PLAIN, y, 0);
            x += rows * D, y += rows * D, hidden += rows * 2 * F;
        }
    return 0;
}

/* Adds to dx or to the weights' gradients if dx_sum or w_sum, and overwrites them otherwise. */
int ffn_backward(const REAL *grad, const REAL *x, const REAL *gate_up, const REAL *down,
                 const REAL *hidden, REAL *dx, REAL *dgate_up, REAL *ddown, long S, long N,
                 long D, long F, long gate_up_lane, long down_lane, long dx_sum, long w_sum) {
    REAL *product = scratch(BACKWARD_TOKENS * 4 * F);
    if (!product) return 1;
    REAL *dproduct = product + BACKWARD_TOKENS * F, *dhidden = dproduct + BACKWARD_TOKENS * F;
    for (long s = 0; s < S; s++, gate_up += gate_up_lane, down += down_lane) {
        for (long n = 0, rows; n < N; n += rows) {
            rows = least(BACKWARD_TOKENS, N - n);
            multiply(rows, F, D, grad, PLAIN, down, TURNED, dproduct, 0);
            swiglu_backward(dproduct, hidden, dhidden, product, rows, F);
            multiply(F, D, rows, product, TURNED, grad, PLAIN, ddown, w_sum || n);
            multiply(D, 2 * F, rows, x, TURNED, dhidden, PLAIN, dgate_up, w_sum || n);
            multiply(rows, D, 2 * F, dhidden, PLAIN, gate_up, TURNED, dx, dx_sum);
            x += rows * D, dx += rows * D, grad += rows * D, hidden += rows * 2 * F;
        }
        dgate_up += gate_up_lane, ddown += down_lane;
    }
    return 0;
}

/* Cross-entropy of rows of logits (N, V) against targets; returns the mean. Leaves the
 * gradient of the mean in the logits. */
double cross_entropy(REAL *logits, const int64_t *tokens, long B, long T, long V) {
    double sum_of_losses = 0;
    for (long b = 0; b < B; b++)
        for (long t = 0; t < T; t++, logits += V) {
            REAL most = logits[0], sum = 0, target = logits[tokens[b * (T + 1) + t + 1]];
            for (long v = 1; v < V; v++) most = logits[v] > most ? logits[v] : most;
#pragma omp simd reduction(+ : sum)
            for (long v = 0; v < V; v++) {
                logits[v] = fast_exp(logits[v] - most);
                sum += logits[v];
            }
            sum_of_losses += log((double)sum) + (double)most - (double)target;
            REAL scale = 1 / (sum * (REAL)(B * T));
#pragma omp simd
            for (long v = 0; v < V; v++) logits[v] *= scale;
            logits[tokens[b * (T + 1) + t + 1]] -= 1 / (REAL)(B * T);
        }
    return sum_of_losses / (double)(B * T);
}

