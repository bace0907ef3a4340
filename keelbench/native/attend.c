/* Causal grouped-query attention under RoPE, a strip of queries at a time. */
#include "kernels.h"

enum { WIDE = 64 / sizeof(REAL), TILE = 8 };
typedef REAL vec __attribute__((vector_size(64), aligned(sizeof(REAL)), may_alias));
#define VEC(pointer) (*(vec *)(pointer))

/* c (rows, columns) = or += a (rows, depth) b (depth, columns); a by strides, b and c with
 * rows of ldb and ldc; rows a multiple of TILE, columns of WIDE. */
static inline void product(long rows, long columns, long depth, const REAL *a, long a_row,
                           long a_column, const REAL *b, long ldb, REAL *c, long ldc,
                           int is_sum) {
    for (long i = 0; i < rows; i += TILE)
        for (long j = 0; j < columns; j += WIDE) {
            vec sum[TILE];
#pragma GCC unroll 8
            for (int r = 0; r < TILE; r++)
                sum[r] = is_sum ? VEC(c + (i + r) * ldc + j) : (vec){0};
            for (long k = 0; k < depth; k++) {
                vec right = VEC(b + k * ldb + j);
#pragma GCC unroll 8
                for (int r = 0; r < TILE; r++)
                    sum[r] += a[(i + r) * a_row + k * a_column] * right;
            }
#pragma GCC unroll 8
            for (int r = 0; r < TILE; r++) VEC(c + (i + r) * ldc + j) = sum[r];
        }
}

/* One head out of rows of heads: turned (unless turn is NULL) and scaled, (T, Kp). */
static void load(const REAL *x, long stride, const REAL *turn, REAL scale, REAL *out, long T,
                 long K, long Kp) {
    for (long t = 0; t < T; t++, x += stride, out += Kp)
        if (turn)
            for (long k = 0; k < K; k += 2) {
                REAL real = turn[t * K + k] * scale, imaginary = turn[t * K + k + 1] * scale;
                out[k] = x[k] * real - x[k + 1] * imaginary;
                out[k + 1] = x[k] * imaginary + x[k + 1] * real;
            }
        else
            for (long k = 0; k < K; k++) out[k] = x[k] * scale;
}

/* The reverse of load, for gradients: turned back. */
static void store(const REAL *x, const REAL *turn, REAL scale, REAL *out, long stride, long T,
                  long K, long Kp) {
    for (long t = 0; t < T; t++, x += Kp, out += stride)
        if (turn)
            for (long k = 0; k < K; k += 2) {
                REAL real = turn[t * K + k] * scale, imaginary = turn[t * K + k + 1] * scale;
                out[k] = x[k] * real + x[k + 1] * imaginary;
                out[k + 1] = x[k + 1] * real - x[k] * imaginary;
            }
        else
            for (long k = 0; k < K; k++) out[k] = x[k] * scale;
}

static void transpose(const REAL *x, REAL *out, long T, long K, long Kp, long Tp) {
    for (long t = 0; t < T; t++)
        for (long k = 0; k < K; k++) out[k * Tp + t] = x[t * Kp + k];
}

/* Scores of one strip of queries, keys before queries: (seen, STRIP), so that a softmax runs
 * down the columns. */
static inline void scores(const REAL *k, const REAL *qt, REAL *s, long seen, long K, long Kp,
                          long Tp) {
    product(seen, STRIP, K, k, Kp, 1, qt, Tp, s, STRIP, 0);
    for (long j = 0; j < STRIP; j++)
        for (long r = 0; r < j; r++) s[(seen - STRIP + j) * STRIP + r] = -INFINITY;
}

/* qkv (B, T, H + 2G, K), not yet turned;
 * turn (T, K / 2) complex; y (B, T, H, K). softmax (B, H, 2, Tp), Tp = T rounded up to 16:
 * each row's largest score and 1 / sum, for the backward pass. */
int attend_forward(const REAL *qkv, const REAL *turn, REAL *y, REAL *softmax, long B,
                      long T, long H, long G, long K) {
    long Tp = padded(T), Kp = padded(K), stride = (H + 2 * G) * K, head = Tp * Kp;
    size_t need = 4 * head + STRIP * (Tp + Kp);
    REAL *q = scratch(need);
    if (!q) return 1;
    memset(q, 0, need * sizeof(REAL));
    REAL *k = q + head, *v = k + head, *qt = v + head, *s = qt + head, *o = s + STRIP * Tp;
    for (long at = 0; at < B * H; at++, softmax += 2 * Tp) {
        long b = at / H, h = at % H, g = h / (H / G);
        const REAL *x = qkv + b * T * stride;
        REAL *out = y + b * T * H * K + h * K;
        load(x + h * K, stride, turn, 1 / (REAL)sqrt((double)K), q, T, K, Kp);
        transpose(q, qt, T, K, Kp, Tp);
        if (h % (H / G) == 0) {
            load(x + (H + g) * K, stride, turn, 1, k, T, K, Kp);
            load(x + (H + G + g) * K, stride, NULL, 1, v, T, K, Kp);
        }
        for (long i = 0; i < T; i += STRIP) {
            long seen = i + STRIP;
            REAL *most = softmax + i, *inverse = softmax + Tp + i;
            scores(k, qt + i, s, seen, K, Kp, Tp);
            memcpy(most, s, STRIP * sizeof(REAL));
            for (long j = 1; j < seen; j++)
                for (int r = 0; r < STRIP; r++)
                    most[r] = s[j * STRIP + r] > most[r] ? s[j * STRIP + r] : most[r];
            memset(inverse, 0, STRIP * sizeof(REAL));
            for (long j = 0; j < seen; j++)
#pragma omp simd
                for (int r = 0; r < STRIP; r++) {
                    s[j * STRIP + r] = fast_exp(s[j * STRIP + r] - most[r]);
                    inverse[r] += s[j * STRIP + r];
                }
            product(STRIP, Kp, seen, s, 1, STRIP, v, Kp, o, Kp, 0);
            for (int r = 0; r < STRIP; r++) inverse[r] = 1 / inverse[r];
            for (long r = 0; r < STRIP && i + r < T; r++)
                for (long c = 0; c < K; c++)
                    out[(i + r) * H * K + c] = o[r * Kp + c] * inverse[r];
        }
    }
    return 0;
}

int attend_backward(const REAL *grad, const REAL *qkv, const REAL *turn, const REAL *y,
                       const REAL *softmax, REAL *grad_qkv, long B, long T, long H, long G,
                       long K) {
    long Tp = padded(T), Kp = padded(K), stride = (H + 2 * G) * K, head = Tp * Kp;
    size_t need = 9 * head + STRIP * 2 * Tp;
    REAL *q = scratch(need), scale = 1 / (REAL)sqrt((double)K);
    if (!q) return 1;
    memset(q, 0, need * sizeof(REAL));
    REAL *k = q + head, *v = k + head, *qt = v + head, *dyt = qt + head, *dy = dyt + head;
    REAL *dq = dy + head, *dk = dq + head, *dv = dk + head, *p = dv + head;
    REAL *ds = p + STRIP * Tp;
    for (long at = 0; at < B * H; at++, softmax += 2 * Tp) {
        long b = at / H, h = at % H, g = h / (H / G);
        const REAL *x = qkv + b * T * stride, *out = y + b * T * H * K + h * K;
        REAL *dx = grad_qkv + b * T * stride;
        load(x + h * K, stride, turn, scale, q, T, K, Kp);
        load(grad + (out - y), H * K, NULL, 1, dy, T, K, Kp);
        transpose(q, qt, T, K, Kp, Tp);
        transpose(dy, dyt, T, K, Kp, Tp);
        if (h % (H / G) == 0) {
            load(x + (H + g) * K, stride, turn, 1, k, T, K, Kp);
            load(x + (H + G + g) * K, stride, NULL, 1, v, T, K, Kp);
            memset(dk, 0, 2 * head * sizeof(REAL));
        }
        for (long i = 0; i < T; i += STRIP) {
            long seen = i + STRIP;
            const REAL *most = softmax + i, *inverse = softmax + Tp + i;
            REAL along[STRIP] = {0};
            for (long r = 0; r < STRIP && i + r < T; r++) {
                REAL sum = 0;
#pragma omp simd reduction(+ : sum)
                for (long c = 0; c < K; c++)
                    sum += dy[(i + r) * Kp + c] * out[(i + r) * H * K + c];
                along[r] = sum;
            }
            scores(k, qt + i, p, seen, K, Kp, Tp);
            product(seen, STRIP, K, v, Kp, 1, dyt + i, Tp, ds, STRIP, 0);
            for (long j = 0; j < seen; j++)
#pragma omp simd
                for (int r = 0; r < STRIP; r++) {
                    REAL weight = fast_exp(p[j * STRIP + r] - most[r]) * inverse[r];
                    p[j * STRIP + r] = weight;
                    ds[j * STRIP + r] = weight * (ds[j * STRIP + r] - along[r]);
                }
            product(STRIP, Kp, seen, ds, 1, STRIP, k, Kp, dq + i * Kp, Kp, 0);
            product(seen, Kp, STRIP, ds, STRIP, 1, q + i * Kp, Kp, dk, Kp, 1);
            product(seen, Kp, STRIP, p, STRIP, 1, dy + i * Kp, Kp, dv, Kp, 1);
        }
        store(dq, turn, scale, dx + h * K, stride, T, K, Kp);
        if (h % (H / G) == H / G - 1) {
            store(dk, turn, 1, dx + (H + g) * K, stride, T, K, Kp);
            store(dv, NULL, 1, dx + (H + G + g) * K, stride, T, K, Kp);
        }
    }
    return 0;
}

