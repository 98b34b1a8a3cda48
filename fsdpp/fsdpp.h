#pragma once

// All of the library's face: what a training program needs.
#include "fsdpp/comm/connect.h"
#include "fsdpp/comm/mesh_group.h"
#include "fsdpp/nn/embedding.h"
#include "fsdpp/nn/expert_feed_forward.h"
#include "fsdpp/nn/grouped_linear.h"
#include "fsdpp/nn/linear.h"
#include "fsdpp/nn/llama.h"
#include "fsdpp/nn/recompute.h"
#include "fsdpp/nn/rms_norm.h"
#include "fsdpp/optim/adamw.h"
#include "fsdpp/optim/clip.h"
#include "fsdpp/optim/schedule.h"
#include "fsdpp/runtime/call.h"
#include "fsdpp/runtime/fully_shard.h"
#include "fsdpp/runtime/own_gradients.h"
