/* A whole model: the operations of a traced program, one after another. */
#include "kernels.h"

/* A program: the model as a list of operations on values (S, N, D), planned in Python.
 * Offsets count REALs: values and what is kept lie in the arena, weights and their gradients
 * in rows of one lane each. -1: none. */
enum { SKIP, EMBED, NORM, ADD, ATTENTION, FFN, HEAD };
typedef struct {
    int64_t kind, a, b, out, weight[5], kept[3];
    int64_t dout, da, db, a_sum, b_sum, w_sum;
    double alpha, beta;
} Op;
typedef struct {
    int64_t S, B, T, D, H, G, K, F, V, lane;
    double eps;
} Sizes;

static Gains gains_of(const Op *op, const Sizes *z, REAL *rows) {
    Gains gains = {.H = z->H, .G = z->G, .K = z->K, .eps = z->eps};
    for (int kind = 0; kind < 3; kind++)
        gains.of[kind] = op->weight[2 + kind] < 0 ? NULL : rows + op->weight[2 + kind];
    return gains;
}

int run_forward(const Op *ops, long count, const Sizes *z, REAL *weights, REAL *arena,
                const int64_t *tokens, const REAL *turn, REAL *losses) {
    long S = z->S, B = z->B, T = z->T, N = B * T, D = z->D, status = 0;
    for (const Op *op = ops; op < ops + count && !status; op++) {
        const REAL *a = arena + op->a, *b = arena + op->b, *w = weights + op->weight[0];
        const REAL *w1 = weights + op->weight[1];
        REAL *out = arena + op->out, *kept = arena + op->kept[0];
        REAL alpha = op->alpha, beta = op->beta;
        switch (op->kind) {
        case SKIP: break;
        case EMBED:
            for (long s = 0; s < S; s++)
                for (long n = 0; n < N; n++, out += D)
                    memcpy(out, w + s * z->lane + tokens[(s * B + n / T) * (T + 1) + n % T] * D,
                           D * sizeof(REAL));
            break;
        case NORM: rms_forward(a, w, out, kept, S, N, D, z->lane, z->eps); break;
        case ADD:
#pragma omp simd
            for (long i = 0; i < S * N * D; i++)
                out[i] = op->b < 0 ? alpha * a[i] : alpha * a[i] + beta * b[i];
            break;
        case ATTENTION:
            status = attention_forward(a, w, w1, gains_of(op, z, weights), turn, kept,
                                       arena + op->kept[1], arena + op->kept[2], out, S, B, T,
                                       D, z->lane);
            break;
        case FFN:
            status = ffn_forward(a, w, w1, kept, out, S, N, D, z->F, z->lane, z->lane);
            break;
        case HEAD:
            for (long s = 0; s < S; s++, kept += N * z->V) {
                multiply(N, z->V, D, a + s * N * D, PLAIN, w + s * z->lane, PLAIN, kept, 0);
                losses[s] = cross_entropy(kept, tokens + s * B * (T + 1), B, T, z->V);
            }
        }
    }
    return status;
}

/* out = or += x * by; nothing to do in place. */
static void scale_into(REAL *out, const REAL *x, REAL by, int is_sum, long size) {
    if (out == x && by == 1 && !is_sum) return;
#pragma omp simd
    for (long i = 0; i < size; i++) out[i] = (is_sum ? out[i] : 0) + by * x[i];
}

/* Gradients of the losses, each times its scale, in the weights' layout. */
int run_backward(const Op *ops, long count, const Sizes *z, REAL *weights, REAL *arena,
                 const int64_t *tokens, const REAL *turn, const REAL *scales, REAL *grads) {
    long S = z->S, B = z->B, T = z->T, N = B * T, D = z->D, V = z->V, status = 0;
    for (const Op *op = ops + count - 1; op >= ops && !status; op--) {
        const REAL *a = arena + op->a, *w = weights + op->weight[0];
        const REAL *w1 = weights + op->weight[1], *grad = arena + op->dout;
        REAL *dw = grads + op->weight[0], *dw1 = grads + op->weight[1];
        REAL *da = arena + op->da, *db = arena + op->db, *kept = arena + op->kept[0];
        REAL alpha = op->alpha, beta = op->beta;
        switch (op->kind) {
        case SKIP: break;
        case EMBED:
            for (long s = 0; s < S; s++, dw += z->lane) {
                memset(dw, 0, V * D * sizeof(REAL));
                for (long n = 0; n < N; n++, grad += D) {
                    REAL *row = dw + tokens[(s * B + n / T) * (T + 1) + n % T] * D;
                    for (long c = 0; c < D; c++) row[c] += grad[c];
                }
            }
            break;
        case NORM:
            for (long s = 0; s < S && !op->w_sum; s++)
                memset(dw + s * z->lane, 0, D * sizeof(REAL));
            rms_backward(grad, a, w, kept, da, dw, S, N, D, z->lane, op->a_sum);
            break;
        case ADD:
            scale_into(da, grad, alpha, op->a_sum, S * N * D);
            if (op->b >= 0) scale_into(db, grad, beta, op->b_sum, S * N * D);
            break;
        case ATTENTION:
            for (long s = 0; s < S && !op->w_sum; s++)
                for (int kind = 2; kind < 5; kind++)
                    if (op->weight[kind] >= 0)
                        memset(grads + s * z->lane + op->weight[kind], 0, z->K * sizeof(REAL));
            status = attention_backward(grad, a, w, w1, gains_of(op, z, weights), turn, kept,
                                        arena + op->kept[1], arena + op->kept[2], da, dw, dw1,
                                        gains_of(op, z, grads), S, B, T, D, z->lane,
                                        op->a_sum, op->w_sum);
            break;
        case FFN:
            status = ffn_backward(grad, a, w, w1, kept, da, dw, dw1, S, N, D, z->F, z->lane,
                                  z->lane, op->a_sum, op->w_sum);
            break;
        case HEAD:
            for (long s = 0; s < S; s++, kept += N * V) {
                scale_into(kept, kept, scales[s], 0, N * V);
                multiply(D, V, N, a + s * N * D, TURNED, kept, PLAIN, dw + s * z->lane, 0);
                multiply(N, D, V, kept, PLAIN, w + s * z->lane, TURNED, da + s * N * D,
                         op->a_sum);
            }
        }
    }
    return status;
}
