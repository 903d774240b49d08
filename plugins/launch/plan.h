// Which kernels a step launches, with which grids: the rules of every host, and of Python's sessions
// through kvg_cuda_plan. What the kernels rely on is said in kvgraph/kernels/.
#pragma once

#include "kvgraph/launch.h"

namespace kvg::launch {

// Fills in the launches and the scratch memory of a plan. Refuses sizes that no step has.
void plan_step(kvg_plan& plan);

// Fills in `scratch` with what any step up to `sizes` may use.
void bound_scratch(kvg_plan& plan);

}  // namespace kvg::launch
