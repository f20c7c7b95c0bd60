// The linear methods, one per stored weight format. Use LinearMethodFor (linear_method.h).
#pragma once

#include "models/quant/linear_method.h"

namespace lockstep {

const LinearMethod& Bf16LinearMethod();        // bf16.cc
const LinearMethod& Nvfp4LinearMethod();       // nvfp4.cc
const LinearMethod& Fp8TensorLinearMethod();   // fp8.cc
const LinearMethod& Fp8ChannelLinearMethod();  // fp8.cc
const LinearMethod& Fp8BlockLinearMethod();    // fp8.cc

}  // namespace lockstep
