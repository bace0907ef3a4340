/* The attention sub-layer: projections, norms per head and attention, in chunks of tokens. */
#include "kernels.h"

static inline int is_normed(const Gains *g) { return g->of[0] || g->of[1] || g->of[2]; }
static inline int kind_of(const Gains *g, long head) {
    return head < g->H ? 0 : head < g->H + g->G ? 1 : 2;
}

static void norm_heads(const Gains *g, const REAL *x, REAL *out, long tokens) {
    REAL inverse;
    for (long n = 0; n < tokens; n++)
        for (long head = 0; head < g->H + 2 * g->G; head++, x += g->K, out += g->K)
            if (g->of[kind_of(g, head)])
                rms_forward(x, g->of[kind_of(g, head)], out, &inverse, 1, 1, g->K, 0, g->eps);
            else
                memcpy(out, x, g->K * sizeof(REAL));
}

/* Replaces the gradients of the normed heads by those of x. */
static void norm_heads_backward(const Gains *g, const Gains *dg, const REAL *x, REAL *grad,
                                REAL *row, long tokens) {
    REAL inverse;
    for (long n = 0; n < tokens; n++)
        for (long head = 0; head < g->H + 2 * g->G; head++, x += g->K, grad += g->K) {
            int kind = kind_of(g, head);
            if (!g->of[kind]) continue;
            rms_forward(x, g->of[kind], row, &inverse, 1, 1, g->K, 0, g->eps);
            rms_backward(grad, x, g->of[kind], &inverse, row, dg->of[kind], 1, 1, g->K, 0, 0);
            memcpy(grad, row, g->K * sizeof(REAL));
        }
}

static void next_lane(Gains *g, long lane) {
    for (int kind = 0; kind < 3; kind++)
        if (g->of[kind]) g->of[kind] += lane;
}

/* The attention sub-layer of x (S, B x T, D); qkv_weight (S, D, E), E = (H + 2G) K;
 * out_weight (S, H K, D); keeps qkv (S, B, T, E), y (S, B, T, H K) and softmax. */
int attention_forward(const REAL *x, const REAL *qkv_weight, const REAL *out_weight,
                             Gains gains, const REAL *turn, REAL *qkv, REAL *y, REAL *softmax,
                             REAL *result, long S, long B, long T, long D, long lane) {
    long H = gains.H, G = gains.G, K = gains.K, E = (H + 2 * G) * K;
    long chunk = T < FORWARD_TOKENS ? FORWARD_TOKENS / T : 1;
    REAL *normed = is_normed(&gains) ? scratch(chunk * T * E) : qkv;
    if (!normed) return 1;
    for (long s = 0; s < S; s++, qkv_weight += lane, out_weight += lane) {
        for (long b = 0, count; b < B; b += count) {
            count = least(chunk, B - b);
            long rows = count * T;
            multiply(rows, E, D, x, PLAIN, qkv_weight, PLAIN, qkv, 0);
            if (is_normed(&gains)) norm_heads(&gains, qkv, normed, rows);
            else normed = qkv;
            if (attend_forward(normed, turn, y, softmax, count, T, H, G, K)) return 1;
            multiply(rows, D, H * K, y, PLAIN, out_weight, PLAIN, result, 0);
            x += rows * D, qkv += rows * E, y += rows * H * K, result += rows * D;
            softmax += count * H * 2 * padded(T);
        }
        next_lane(&gains, lane);
    }
    return 0;
}

int attention_backward(const REAL *grad, const REAL *x, const REAL *qkv_weight,
                              const REAL *out_weight, Gains gains, const REAL *turn,
                              const REAL *qkv, const REAL *y, const REAL *softmax, REAL *dx,
                              REAL *dqkv_weight, REAL *dout_weight, Gains dgains, long S,
                              long B, long T, long D, long lane, long dx_sum, long w_sum) {
    long H = gains.H, G = gains.G, K = gains.K, E = (H + 2 * G) * K;
    long chunk = T < BACKWARD_TOKENS ? BACKWARD_TOKENS / T : 1;
    REAL *dy = scratch(chunk * T * (H * K + 2 * E) + K);
    if (!dy) return 1;
    REAL *dqkv = dy + chunk * T * H * K, *copy = dqkv + chunk * T * E;
    REAL *row = copy + chunk * T * E;
    for (long s = 0; s < S; s++, qkv_weight += lane, out_weight += lane) {
        for (long b = 0, count; b < B; b += count) {
            count = least(chunk, B - b);
            long rows = count * T;
            const REAL *normed = is_normed(&gains) ? copy : qkv;
            if (is_normed(&gains)) norm_heads(&gains, qkv, copy, rows);
            multiply(rows, H * K, D, grad, PLAIN, out_weight, TURNED, dy, 0);
            multiply(H * K, D, rows, y, TURNED, grad, PLAIN, dout_weight, w_sum || b);
            if (attend_backward(dy, normed, turn, y, softmax, dqkv, count, T, H, G, K))
                return 1;
            if (is_normed(&gains)) norm_heads_backward(&gains, &dgains, qkv, dqkv, row, rows);
            multiply(D, E, rows, x, TURNED, dqkv, PLAIN, dqkv_weight, w_sum || b);
            multiply(rows, D, E, dqkv, PLAIN, qkv_weight, TURNED, dx, dx_sum);
            x += rows * D, dx += rows * D, grad += rows * D;
            qkv += rows * E, y += rows * H * K, softmax += count * H * 2 * padded(T);
        }
        dqkv_weight += lane, dout_weight += lane;
        next_lane(&gains, lane), next_lane(&dgains, lane);
    }
    return 0;
}

