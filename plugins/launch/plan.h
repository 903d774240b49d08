// Rules that choose the kernels that a step launches, and their grids. Every host uses them, and
// Python's sessions through kvg_cuda_plan. kvgraph/kernels/ says what the kernels rely on.
#pragma once

#include "kvgraph/launch.h"

namespace kvg::launch {

// Fills in the launches and the scratch memory of a plan. Refuses sizes that no step has.
void plan_step(kvg_plan& plan);

// Fills in `scratch` with the most that any step up to `sizes` may use.
void bound_scratch(kvg_plan& plan);

}  // namespace kvg::launch
