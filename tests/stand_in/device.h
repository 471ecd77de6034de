// The stand-in as torch sees it.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "order.h"

namespace stand_in {

void set_device_count(int count);
int device_count();
void register_hooks();
int current_stream(int device);  // of this thread
void host_waits_for_all();

// The same memory as a tensor of the host, which orders nothing and waits for nothing.
at::Tensor host_view(const at::Tensor& x);

// A kernel on the current stream reads or writes a tensor.
void touch_tensor(const std::string& what, const at::Tensor& x, bool writes);

}  // namespace stand_in
