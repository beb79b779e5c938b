// Vectors of floats as wide as the CPU's registers, with sums, logarithms and powers of 2.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace sparseformer {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Vector types of GCC and Clang: arithmetic is lane by lane; a comparison gives -1 or 0 per lane.
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef std::int32_t Ints __attribute__((vector_size(LANES * 4)));

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float TINY = std::numeric_limits<float>::min();
constexpr double ROUNDING = std::numeric_limits<float>::epsilon();
constexpr double LN2 = 0.6931471805599453;
constexpr double LOG2_E = 1.4426950408889634;
// Vectors that are summed in fp32 before they are added up in double: keeps the error at rounding.
constexpr std::int64_t SUM_BLOCK = 32;

inline Floats spread(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
    Floats result;
    std::memcpy(&result, from, sizeof result);
    return result;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// The first `count` entries, and `fill` in the others; all of them if count is LANES or more.
inline Floats load_part(const float* from, std::int64_t count, float fill) {
    if (count >= LANES) return load(from);
    Floats result = spread(fill);
    std::memcpy(&result, from, count * sizeof(float));
    return result;
}

inline void store_part(float* to, Floats value, std::int64_t count) {
    if (count >= LANES) return store(to, value);
    std::memcpy(to, &value, count * sizeof(float));
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// `value` where the mask is -1, and 0 where it is 0.
inline Floats where(Ints mask, Floats value) { return (Floats)((Ints)value & mask); }

inline bool any(Ints mask) {
    std::uint64_t parts[LANES / 2], all = 0;
    std::memcpy(parts, &mask, sizeof mask);
    for (std::uint64_t part : parts) all |= part;
    return all != 0;
}

inline float sum_lanes(Floats value) {
    float lanes[LANES];
    std::memcpy(lanes, &value, sizeof value);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

inline float largest_lane(Floats value) {
    float largest = value[0];
    for (int lane = 1; lane < LANES; ++lane)
        if (value[lane] > largest) largest = value[lane];
    return largest;
}

// The nearest whole number, |x| < 2**22: adding the constant pushes the fraction out.
inline Floats nearest(Floats x) { return (x + 12582912.0f) - 12582912.0f; }

// 2**(whole + part), |part| <= 1/2, whole in [-126, 127].
inline Floats join_power(Floats whole, Floats part) {
    // Minimax, relative error 2e-9.
    Floats power = part * 1.5353361959569156e-4f + 1.3398875016719103e-3f;
    power = power * part + 9.61843691766262e-3f;
    power = power * part + 5.5503323674201965e-2f;
    power = power * part + 0.24022647738456726f;
    power = power * part + 0.6931471824645996f;
    power = power * part + 1.0f;
    return power * (Floats)((__builtin_convertvector(whole, Ints) + 127) << 23);
}

// 2**x for x < 127; exactly 0 from -126 down and for NaN.
inline Floats exp2_of(Floats x) {
    Floats whole = nearest(x);
    return where(x > -126.0f, join_power(whole, x - whole));
}

// exp(x) for x <= 0; exactly 0 from -87 down and for NaN.
inline Floats exp_of(Floats x) {
    // whole * LN2_HIGH is exact.
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = (float)(LN2 - 0.693359375);
    Floats whole = nearest(x * (float)LOG2_E);
    Floats rest = (x - whole * LN2_HIGH) - whole * LN2_LOW;
    return where(x > -87.0f, join_power(whole, rest * (float)LOG2_E));
}

// log(w + low) for w > 0, |low| far below w; w of at least the smallest normal number.
inline Floats log_of(Floats w, Floats low = Floats{}) {
    constexpr std::int32_t ROOT_HALF = 0x3f3504f3;
    // w = 2**exponent (1 + part) with 1 + part in [sqrt(1/2), sqrt(2)).
    Ints exponent = ((Ints)w - ROOT_HALF) >> 23;
    Floats part = (Floats)((Ints)w - (exponent << 23)) - 1.0f;
    part += low * (Floats)((127 - exponent) << 23);
    // Minimax of (log(1 + part) - part + part**2 / 2) / part**3, relative error 6e-9.
    Floats rest = part * -7.634492963552475e-2f + 0.12761574983596802f;
    rest = rest * part - 0.13160182535648346f;
    rest = rest * part + 0.14201758801937103f;
    rest = rest * part - 0.16623356938362122f;
    rest = rest * part + 0.20001226663589478f;
    rest = rest * part - 0.2500081956386566f;
    rest = rest * part + 0.3333333134651184f;
    Floats square = part * part;
    Floats logarithm = square * (rest * part - 0.5f) + part;
    return __builtin_convertvector(exponent, Floats) * (float)LN2 + logarithm;
}

// log(1 + x) for x in (-1, 1], right to rounding also where 1 + x loses most bits of x.
inline Floats log1p_of(Floats x, Floats w) { return log_of(w, x - (w - 1.0f)); }

}  // namespace sparseformer
