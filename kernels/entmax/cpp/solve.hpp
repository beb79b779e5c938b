// Threshold and probabilities of one row: Newton's method on the scores that can have a share.
#pragma once

#include <algorithm>

#include "scratch.hpp"

namespace sparseformer {

constexpr int MAX_STEPS = 64;
// Steps on the lane maxima, whose root is only a start.
constexpr int SKETCH_STEPS = 5;
constexpr int SKETCH = 8;

struct Sums {
    double probs = 0, slopes = 0;
};

struct Point {
    Floats prob, slope;
};

// The three ways to p and u. Each has a threshold, scaled_t = eps t, in fp32.
struct Powerless {
    static constexpr bool KEEPS_VALUES = false;
    float shift = 0;

    // 1 - scaled_t keeps more digits where p is small.
    void move_to(double scaled_t) { shift = (float)(1 - scaled_t); }
    double scaled_t() const { return 1 - (double)shift; }
};

struct Entmax15 : Powerless {
    static constexpr bool smooth = true;
    static constexpr double eps = 0.5;

    Point at(Floats y) const {
        Floats root = larger(y + shift, Floats{});
        return {root * root, root};
    }
    double step(Sums sums) const { return (sums.probs - std::sqrt(sums.probs)) / sums.slopes; }
};

struct Sparsemax : Powerless {
    static constexpr bool smooth = false;
    static constexpr double eps = 1.0;

    Point at(Floats y) const {
        Floats prob = y + shift;
        return {larger(prob, Floats{}), where(prob > 0.0f, spread(1.0f))};
    }
    double step(Sums sums) const { return (sums.probs - 1) / sums.slopes; }
};

struct AnyAlpha {
    static constexpr bool KEEPS_VALUES = true;
    double eps;
    // Up to alpha = 1.5, u is Lipschitz in t.
    bool smooth = eps <= 0.5;
    float power = (float)(LOG2_E / eps), threshold = 0;

    explicit AnyAlpha(double eps) : eps(eps) {}

    // Below 1, so that the largest score stays in the support.
    void move_to(double t) { threshold = std::min((float)t, 1 - (float)ROUNDING / 2); }
    double scaled_t() const { return threshold; }

    Point at(Floats y) const {
        Floats x = y - threshold, w = x + 1.0f;
        Ints inside = w > 0.0f;
        Floats prob = where(inside, exp2_of(log1p_of(x, w) * power));
        return {prob, where(inside, prob / w)};
    }
    double step(Sums sums) const {
        float mass = (float)sums.probs;
        return -sums.probs / sums.slopes * std::expm1((float)-eps * std::log(mass));
    }
};

// Sums p and u over the candidates of a row; keeps them where they cost powers.
template <class Map>
Sums evaluate(const Map& map, Scratch& row, int64_t vectors) {
    Sums sums;
    for (int64_t start = 0; start < vectors; start += SUM_BLOCK) {
        Floats probs[2] = {}, slopes[2] = {};
        int64_t stop = std::min(start + SUM_BLOCK, vectors);
        for (int64_t at = start; at < stop; at += 2) {
            for (int half = 0; half < 2; ++half) {
                int64_t offset = (at + half) * LANES;
                Point point = map.at(load(row.scores + offset));
                probs[half] += point.prob;
                slopes[half] += point.slope;
                if (Map::KEEPS_VALUES) {
                    store(row.probs + offset, point.prob);
                    store(row.slopes + offset, point.slope);
                }
            }
        }
        sums.probs += sum_lanes(probs[0] + probs[1]);
        sums.slopes += sum_lanes(slopes[0] + slopes[1]);
    }
    return sums;
}

// Newton on the r-norm from a lower bound, the map's threshold. Leaves the map at the last point
// evaluated and returns the step of t that is left, small enough to be folded into p.
template <class Map>
double climb(Map& map, Scratch& row, int64_t vectors, int max_steps) {
    double previous = 0.01;
    for (int step = 0;; ++step) {
        Sums sums = evaluate(map, row, vectors);
        double scaled_step = map.step(sums), excess = sums.probs - 1;
        double size = std::abs(scaled_step) / map.eps;
        // Where p is smooth, every step squares the error: the next one would be about this large.
        double next = size * (size / previous) * (size / previous);
        // Elsewhere scores leave the support on the way, and rounding must be all that is left.
        bool arrived = map.smooth ? size <= 2e-4 && next <= 1e-8
                                  : size <= 8 * ROUNDING && excess <= 8 * ROUNDING;
        Map moved = map;
        moved.move_to(map.scaled_t() + scaled_step);
        bool stuck = moved.scaled_t() == map.scaled_t();
        if (arrived || stuck || step == max_steps) return excess / sums.slopes;
        map = moved;
        previous = size;
    }
}

// Maxima of SKETCH * LANES disjoint parts of a row.
inline void sketch_row(const float* scores, int64_t length, Floats (&maxima)[SKETCH]) {
    for (Floats& maximum : maxima) maximum = spread(-INF);
    int64_t start = 0;
    for (; start + SKETCH * LANES <= length; start += SKETCH * LANES)
        for (int part = 0; part < SKETCH; ++part)
            maxima[part] = larger(load(scores + start + part * LANES), maxima[part]);
    for (int part = 0; start < length; start += LANES, ++part)
        maxima[part] = larger(load_part(scores + start, length - start, -INF), maxima[part]);
}

inline bool holds_nan(const float* scores, int64_t length) {
    return std::any_of(scores, scores + length, [](float score) { return score != score; });
}

// Gathers the vectors with a score above `bound`, shifted and scaled; returns the mean of all.
// NaN if the row holds a NaN or +inf.
inline double gather(const float* scores, int64_t length, float top, float eps, double bound,
                     Scratch& row, int64_t& vectors) {
    double total = 0;
    int64_t count = 0;
    float least = (float)bound;
    for (int64_t start = 0; start < length; start += SUM_BLOCK * LANES) {
        Floats sum = {};
        int64_t stop = std::min(start + SUM_BLOCK * LANES, length);
        for (int64_t at = start; at < stop; at += LANES) {
            Floats y = (load_part(scores + at, length - at, top) - top) * eps;
            sum += y;
            if (length - at < LANES) y = (load_part(scores + at, length - at, -INF) - top) * eps;
            store(row.scores + count * LANES, y);
            row.place[count] = at;
            count += any(y > least);
        }
        total += sum_lanes(sum);
    }
    store(row.scores + count * LANES, spread(-INF));
    vectors = count;
    return total / (double)length;
}

struct Solved {
    float *probs, *maximum, *threshold;
};

inline void fill(const Solved& out, int64_t length, float value) {
    std::fill_n(out.probs, length, value);
    *out.maximum = *out.threshold = value;
}

// The p of every candidate, moved along -u by the step that is left, and 0 elsewhere.
template <class Map>
void write(const Map& map, const Scratch& row, int64_t vectors, float step, float* probs,
           int64_t length) {
    if (vectors * LANES < length) std::fill_n(probs, length, 0.0f);
    for (int64_t index = 0; index < vectors; ++index) {
        int64_t at = row.place[index];
        Point point = Map::KEEPS_VALUES
                          ? Point{load(row.probs + index * LANES), load(row.slopes + index * LANES)}
                          : map.at(load(row.scores + index * LANES));
        Floats moved = larger(point.prob - point.slope * step, Floats{});
        store_part(probs + at, moved, length - at);
    }
}

template <class Map>
void solve_row(Map map, const float* scores, int64_t length, float top, Floats (&maxima)[SKETCH],
               Scratch& row, const Solved& out) {
    map.move_to(0);
    if (length >= 2 * SKETCH * LANES) {
        for (int part = 0; part < SKETCH; ++part)
            store(row.scores + part * LANES, (maxima[part] - top) * (float)map.eps);
        climb(map, row, SKETCH, SKETCH_STEPS);
    }
    int64_t vectors = 0;
    // A score that rounding of the bound would drop has a p of rounding.
    double bound = map.scaled_t() - 1 - 4 * ROUNDING;
    double mean = gather(scores, length, top, (float)map.eps, bound, row, vectors);
    if (mean != mean) return fill(out, length, NAN);
    // t is convex and symmetric in the scores, so n scores that equal their mean have a lower t.
    double all_equal = mean - std::expm1(-map.eps * std::log((double)length));
    map.move_to(std::max(map.scaled_t(), all_equal));
    double step = climb(map, row, vectors, MAX_STEPS);
    write(map, row, vectors, (float)step, out.probs, length);
    *out.maximum = top;
    *out.threshold = (float)(map.scaled_t() / map.eps + step);
}

inline void softmax_row(const float* scores, int64_t length, float top, const Solved& out) {
    double mass = 0;
    for (int64_t start = 0; start < length; start += SUM_BLOCK * LANES) {
        Floats sum = {};
        int64_t stop = std::min(start + SUM_BLOCK * LANES, length);
        for (int64_t at = start; at < stop; at += LANES) {
            Floats x = load_part(scores + at, length - at, -INF) - top;
            // exp_of gives 0 for NaN.
            Floats power = (Floats)((Ints)exp_of(x) | (x != x));
            sum += power;
            store_part(out.probs + at, power, length - at);
        }
        mass += sum_lanes(sum);
    }
    if (mass != mass) return fill(out, length, NAN);
    float inverse = (float)(1 / mass);
    for (int64_t at = 0; at < length; ++at) out.probs[at] *= inverse;
    *out.maximum = top;
    *out.threshold = (float)std::log(mass);
}

inline void solve(const float* scores, int64_t length, double eps, Scratch& row,
                  const Solved& out) {
    Floats maxima[SKETCH];
    sketch_row(scores, length, maxima);
    Floats largest = maxima[0];
    for (int part = 1; part < SKETCH; ++part) largest = larger(maxima[part], largest);
    float top = largest_lane(largest);
    if (top == -INF) return fill(out, length, holds_nan(scores, length) ? NAN : 0.0f);
    if (eps <= ROUNDING) return softmax_row(scores, length, top, out);
    if (eps == 0.5) return solve_row(Entmax15(), scores, length, top, maxima, row, out);
    if (eps == 1.0) return solve_row(Sparsemax(), scores, length, top, maxima, row, out);
    solve_row(AnyAlpha(eps), scores, length, top, maxima, row, out);
}

}  // namespace sparseformer
