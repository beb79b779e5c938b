// Gradients of one row in closed form, from its probabilities.
#pragma once

#include <algorithm>

#include "scratch.hpp"

namespace sparseformer {

// u = p**(1 - eps) on the support and 0 off it.
inline Floats slope_of(Floats prob, double eps) {
    Ints inside = prob > 0.0f;
    Floats slope = prob;
    if (eps == 0.5) {
        for (int lane = 0; lane < LANES; ++lane) slope[lane] = std::sqrt(prob[lane]);
    } else if (eps == 1.0) {
        slope = where(inside, spread(1.0f));
    } else if (eps > ROUNDING) {
        Floats bits = log_of(larger(prob, spread(TINY))) * (float)((1 - eps) * LOG2_E);
        slope = where(inside, exp2_of(bits));
    }
    // All bits set is a NaN.
    return (Floats)((Ints)slope | (prob != prob));
}

// p g as `alpha_term` in reference.py, but for a multiple of u, which the sum over dP - delta
// cancels: from alpha = 1.5 up u / eps**2 is left out, since it is far larger than p g.
inline Floats alpha_term(Floats prob, Floats slope, float eps) {
    Floats logarithm = log_of(larger(prob, spread(TINY)));
    Floats y = logarithm * -eps;
    Floats without_slope = (prob * y + prob) / (eps * eps);
    if (eps >= 0.5f) return without_slope;
    // (exp(y) - 1 - y) / y**2: minimax on [0, 1], relative error 8e-10; then the quotient is exact.
    Ints is_near = y < 1.0f;
    Floats near = is_near ? y : Floats{};
    Floats series = near * 3.671581362141296e-5f + 1.8108473159372807e-4f;
    series = series * near + 1.400926150381565e-3f;
    series = series * near + 8.329113945364952e-3f;
    series = series * near + 4.166736453771591e-2f;
    series = series * near + 0.16666662693023682f;
    series = series * near + 0.5f;
    Floats inner = -series * logarithm * logarithm * prob;
    return is_near ? inner : without_slope - slope / (eps * eps);
}

struct Gradients {
    float *d_scores, *d_alpha;
};

// Gathers the vectors of p that hold a piece of the support; returns how many. The upstream
// gradient of the others isn't even read.
inline int64_t gather_support(const float* probs, int64_t length, Scratch& row) {
    int64_t vectors = 0;
    for (int64_t at = 0; at < length; at += LANES) {
        Floats prob = load_part(probs + at, length - at, 0.0f);
        store(row.probs + vectors * LANES, prob);
        row.place[vectors] = at;
        vectors += any(prob != 0.0f);
    }
    return vectors;
}

// Sums value(index) over the gathered vectors.
template <class Value>
double sum_vectors(int64_t vectors, const Value& value) {
    double total = 0;
    for (int64_t start = 0; start < vectors; start += SUM_BLOCK) {
        Floats sum = {};
        int64_t stop = std::min(start + SUM_BLOCK, vectors);
        for (int64_t index = start; index < stop; ++index) sum += value(index);
        total += sum_lanes(sum);
    }
    return total;
}

// Replaces the gathered dP in row.scores by dP - delta, delta = sum u dP / sum u.
inline void centre(Scratch& row, int64_t vectors, double total) {
    auto weighted = [&](int64_t index) {
        return load(row.slopes + index * LANES) * load(row.scores + index * LANES);
    };
    // Twice: the second time takes away what rounding of delta, and of its sums, has left.
    for (int time = 0; time < 2; ++time) {
        float delta = (float)(sum_vectors(vectors, weighted) / total);
        for (int64_t at = 0; at < vectors * LANES; at += LANES)
            store(row.scores + at, load(row.scores + at) - delta);
    }
}

inline void differentiate(const float* probs, const float* grad, int64_t length, double eps,
                          Scratch& row, const Gradients& out) {
    int64_t vectors = gather_support(probs, length, row);
    double total = sum_vectors(vectors, [&](int64_t index) {
        int64_t at = row.place[index];
        Floats slope = slope_of(load(row.probs + index * LANES), eps);
        store(row.slopes + index * LANES, slope);
        store(row.scores + index * LANES, load_part(grad + at, length - at, 0.0f));
        return slope;
    });
    centre(row, vectors, std::max(total, (double)TINY));
    if (out.d_scores) {
        if (vectors * LANES < length) std::fill_n(out.d_scores, length, 0.0f);
        for (int64_t index = 0; index < vectors; ++index) {
            Floats slope = load(row.slopes + index * LANES);
            int64_t at = row.place[index];
            store_part(out.d_scores + at, slope * load(row.scores + index * LANES), length - at);
        }
    }
    if (out.d_alpha) {
        *out.d_alpha = (float)sum_vectors(vectors, [&](int64_t index) {
            Floats prob = load(row.probs + index * LANES), slope = load(row.slopes + index * LANES);
            return alpha_term(prob, slope, (float)eps) * load(row.scores + index * LANES);
        });
    }
}

}  // namespace sparseformer
