// Entmax of rows of fp32 scores: threshold, probabilities and gradients, for alpha in [1, 2].
// The definitions are in ../reference.py and ../gradient.py. Every row is computed alone, so that
// neither its batch nor the number of threads changes a bit of it.

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "gradients.hpp"
#include "solve.hpp"

namespace sparseformer {
namespace {

// Below this many entries of work, a thread costs more than it saves.
constexpr int64_t ENTRIES_PER_THREAD = 100'000;

struct Matrix {
    int64_t rows, length;
};

// eps = alpha - 1, of every row or of all rows (stride 0).
struct Eps {
    const double* values;
    int64_t stride;
    double operator[](int64_t row) const { return values[row * stride]; }
};

// Calls work(first, last, scratch) on equal shares of the rows, one per thread; false if memory is
// short. A thread that can't be started leaves its share to this one.
template <class Work>
bool share_rows(Matrix size, int threads, const Work& work) {
    int64_t useful = size.rows * size.length / ENTRIES_PER_THREAD;
    int64_t shares = std::max<int64_t>(1, std::min({(int64_t)threads, size.rows, useful}));
    std::vector<char> failed(shares, 0);
    auto run = [&](int64_t share) {
        try {
            Scratch scratch(size.length);
            work(size.rows * share / shares, size.rows * (share + 1) / shares, scratch);
        } catch (const std::bad_alloc&) {
            failed[share] = 1;
        }
    };
    std::vector<std::thread> started;
    started.reserve(shares);
    for (int64_t share = 1; share < shares; ++share) {
        try {
            started.emplace_back(run, share);
        } catch (const std::system_error&) {
            run(share);
        }
    }
    run(0);
    for (std::thread& thread : started) thread.join();
    return std::none_of(failed.begin(), failed.end(), [](char flag) { return flag; });
}

}  // namespace
}  // namespace sparseformer

// Both return 0, or 1 if memory is short.
extern "C" int sparseformer_entmax_solve(const float* scores, std::int64_t rows,
                                         std::int64_t length, const double* eps,
                                         std::int64_t eps_stride, float* probs, float* maximum,
                                         float* threshold, int threads) try {
    using namespace sparseformer;
    Eps each{eps, eps_stride};
    return !share_rows({rows, length}, threads, [&](int64_t first, int64_t last, Scratch& scratch) {
        for (int64_t row = first; row < last; ++row)
            solve(scores + row * length, length, each[row], scratch,
                  {probs + row * length, maximum + row, threshold + row});
    });
} catch (const std::bad_alloc&) {
    return 1;
}

// d_scores or d_alpha may be null.
extern "C" int sparseformer_entmax_gradients(const float* probs, const float* grad,
                                             std::int64_t rows, std::int64_t length,
                                             const double* eps, std::int64_t eps_stride,
                                             float* d_scores, float* d_alpha, int threads) try {
    using namespace sparseformer;
    Eps each{eps, eps_stride};
    return !share_rows({rows, length}, threads, [&](int64_t first, int64_t last, Scratch& scratch) {
        for (int64_t row = first; row < last; ++row)
            differentiate(probs + row * length, grad + row * length, length, each[row], scratch,
                          {d_scores ? d_scores + row * length : nullptr,
                           d_alpha ? d_alpha + row : nullptr});
    });
} catch (const std::bad_alloc&) {
    return 1;
}
