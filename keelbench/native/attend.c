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

typedef __typeof__((vec){0} < (vec){0}) places;

static inline vec shuffled(vec a, vec b, places from) {
#ifdef __clang__ /* has no builtin for this, and recognizes the loop */
    vec out;
    for (int i = 0; i < WIDE; i++) out[i] = from[i] < WIDE ? a[from[i]] : b[from[i] - WIDE];
    return out;
#else
    return __builtin_shuffle(a, b, from);
#endif
}

/* Rotary factors (T, K / 2) complex, times a scale. */
static const REAL *scaled(const REAL *turn, REAL scale, REAL *out, long T, long K) {
    for (long i = 0; i < T * K; i++) out[i] = turn[i] * scale;
    return out;
}

/* One head out of rows of heads, turned by the angles. */
static void turned(const REAL *x, long x_row, const REAL *turn, REAL *out, long out_row, long T,
                   long K) {
    places firsts, seconds, others;
    vec flip;
    for (int i = 0; i < WIDE; i++) {
        firsts[i] = i & ~1, seconds[i] = i | 1, others[i] = i ^ 1;
        flip[i] = i & 1 ? 1 : -1;
    }
    for (long t = 0; t < T; t++, x += x_row, out += out_row, turn += K) {
        long k = 0;
        for (; k + WIDE <= K; k += WIDE) {
            vec here = VEC(x + k), angle = VEC(turn + k);
            vec swapped = shuffled(angle, angle, others) * flip;
            VEC(out + k) = shuffled(here, here, firsts) * angle +
                           shuffled(here, here, seconds) * swapped;
        }
        for (; k < K; k += 2) {
            REAL real = turn[k], imaginary = turn[k + 1];
            out[k] = x[k] * real - x[k + 1] * imaginary;
            out[k + 1] = x[k] * imaginary + x[k + 1] * real;
        }
    }
}

/* The reverse, for gradients. */
static void turned_back(const REAL *x, long x_row, const REAL *turn, REAL *out, long out_row,
                        long T, long K) {
    places firsts, seconds, others;
    vec flip;
    for (int i = 0; i < WIDE; i++) {
        firsts[i] = i & ~1, seconds[i] = i | 1, others[i] = i ^ 1;
        flip[i] = i & 1 ? -1 : 1;
    }
    for (long t = 0; t < T; t++, x += x_row, out += out_row, turn += K) {
        long k = 0;
        for (; k + WIDE <= K; k += WIDE) {
            vec here = VEC(x + k), angle = VEC(turn + k);
            vec own = shuffled(angle, angle, firsts), cross = shuffled(angle, angle, seconds);
            VEC(out + k) = here * own + shuffled(here, here, others) * (cross * flip);
        }
        for (; k < K; k += 2) {
            REAL real = turn[k], imaginary = turn[k + 1];
            out[k] = x[k] * real + x[k + 1] * imaginary;
            out[k + 1] = x[k + 1] * real - x[k] * imaginary;
        }
    }
}

static inline void copied(const REAL *x, long x_row, REAL *out, long out_row, long T, long K) {
    for (long t = 0; t < T; t++) memcpy(out + t * out_row, x + t * x_row, K * sizeof(REAL));
}

/* x (Tp, Kp) to out (Kp, Tp), a square of vectors at a time: blocks of 1, 2, 4, ... numbers
 * change places across its diagonal. */
static void transpose(const REAL *x, REAL *out, long Tp, long Kp) {
    for (long t = 0; t < Tp; t += WIDE)
        for (long k = 0; k < Kp; k += WIDE) {
            vec row[WIDE];
#pragma GCC unroll 16
            for (int i = 0; i < WIDE; i++) row[i] = VEC(x + (t + i) * Kp + k);
#pragma GCC unroll 4
            for (int size = 1; size < WIDE; size *= 2) {
                places left, right;
#pragma GCC unroll 16
                for (int j = 0; j < WIDE; j++) {
                    left[j] = j & size ? WIDE + (j ^ size) : j;
                    right[j] = j & size ? WIDE + j : j ^ size;
                }
#pragma GCC unroll 16
                for (int i = 0; i < WIDE; i++) {
                    if (i & size) continue;
                    vec upper = row[i], lower = row[i + size];
                    row[i] = shuffled(upper, lower, left);
                    row[i + size] = shuffled(upper, lower, right);
                }
            }
#pragma GCC unroll 16
            for (int i = 0; i < WIDE; i++) VEC(out + (k + i) * Tp + t) = row[i];
        }
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
    size_t need = 5 * head + STRIP * (Tp + Kp);
    REAL *q = scratch(need);
    if (!q) return 1;
    memset(q, 0, need * sizeof(REAL));
    REAL *k = q + head, *v = k + head, *qt = v + head, *s = qt + head, *o = s + STRIP * Tp;
    const REAL *of_q = scaled(turn, 1 / (REAL)sqrt((double)K), o + STRIP * Kp, T, K);
    for (long at = 0; at < B * H; at++, softmax += 2 * Tp) {
        long b = at / H, h = at % H, g = h / (H / G);
        const REAL *x = qkv + b * T * stride;
        REAL *out = y + b * T * H * K + h * K;
        turned(x + h * K, stride, of_q, q, Kp, T, K);
        transpose(q, qt, Tp, Kp);
        if (h % (H / G) == 0) {
            turned(x + (H + g) * K, stride, turn, k, Kp, T, K);
            copied(x + (H + G + g) * K, stride, v, Kp, T, K);
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
    size_t need = 10 * head + STRIP * 2 * Tp;
    REAL *q = scratch(need);
    if (!q) return 1;
    memset(q, 0, need * sizeof(REAL));
    REAL *k = q + head, *v = k + head, *qt = v + head, *dyt = qt + head, *dy = dyt + head;
    REAL *dq = dy + head, *dk = dq + head, *dv = dk + head, *p = dv + head;
    REAL *ds = p + STRIP * Tp;
    const REAL *of_q = scaled(turn, 1 / (REAL)sqrt((double)K), ds + STRIP * Tp, T, K);
    for (long at = 0; at < B * H; at++, softmax += 2 * Tp) {
        long b = at / H, h = at % H, g = h / (H / G);
        const REAL *x = qkv + b * T * stride, *out = y + b * T * H * K + h * K;
        REAL *dx = grad_qkv + b * T * stride;
        turned(x + h * K, stride, of_q, q, Kp, T, K);
        copied(grad + (out - y), H * K, dy, Kp, T, K);
        transpose(q, qt, Tp, Kp);
        transpose(dy, dyt, Tp, Kp);
        if (h % (H / G) == 0) {
            turned(x + (H + g) * K, stride, turn, k, Kp, T, K);
            copied(x + (H + G + g) * K, stride, v, Kp, T, K);
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
        turned_back(dq, Kp, of_q, dx + h * K, stride, T, K);
        if (h % (H / G) == H / G - 1) {
            turned_back(dk, Kp, turn, dx + (H + g) * K, stride, T, K);
            copied(dv, Kp, dx + (H + G + g) * K, stride, T, K);
        }
    }
    return 0;
}

