// The memory that one thread needs for one row.
#pragma once

#include <memory>

#include "vectors.hpp"

namespace sparseformer {

using std::int64_t;

// Memory of one thread for one row: the vectors that can be in the support, and where they belong.
struct Scratch {
    explicit Scratch(int64_t length) {
        // One vector of padding, so that loops can take two at a time.
        int64_t size = (length / LANES + 3) * LANES;
        memory.reset(new float[3 * size]);
        scores = memory.get();
        probs = scores + size;
        slopes = probs + size;
        place.reset(new int64_t[size / LANES]);
    }
    std::unique_ptr<float[]> memory;
    std::unique_ptr<int64_t[]> place;
    float *scores, *probs, *slopes;
};

}  // namespace sparseformer
