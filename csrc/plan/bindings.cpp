// The planner for Python, so that pytest can ask it about any shape and any GPU on a machine without one.
// Built by CMake (LATE_INTERACTION_PYTHON) as late_interaction_plan; no part of the installed package.
#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backward/short_docs.h"
#include "forward/select.h"
#include "plan.h"

namespace py = pybind11;
namespace li = late_interaction;

PYBIND11_MODULE(late_interaction_plan, m) {
  py::native_enum<li::Layout>(m, "Layout", "enum.Enum")
      .value("in_batch", li::Layout::in_batch)
      .value("per_query", li::Layout::per_query)
      .finalize();
  py::native_enum<li::Dtype>(m, "Dtype", "enum.Enum")
      .value("bf16", li::Dtype::bf16)
      .value("fp16", li::Dtype::fp16)
      .value("fp32", li::Dtype::fp32)
      .value("fp64", li::Dtype::fp64)
      .value("e4m3", li::Dtype::e4m3)
      .value("e5m2", li::Dtype::e5m2)
      .value("int8", li::Dtype::int8)
      .finalize();
  py::native_enum<li::Precision>(m, "Precision", "enum.Enum")
      .value("highest", li::Precision::highest)
      .value("high", li::Precision::high)
      .value("medium", li::Precision::medium)
      .value("fp16", li::Precision::fp16)
      .finalize();
  py::native_enum<li::Backward>(m, "Backward", "enum.Enum")
      .value("automatic", li::Backward::automatic)
      .value("lowmem", li::Backward::lowmem)
      .value("unified", li::Backward::unified)
      .finalize();
  py::native_enum<li::Compute>(m, "Compute", "enum.Enum")
      .value("bf16", li::Compute::bf16)
      .value("fp16", li::Compute::fp16)
      .value("tf32", li::Compute::tf32)
      .value("tf32x3", li::Compute::tf32x3)
      .value("fp64", li::Compute::fp64)
      .value("e4m3", li::Compute::e4m3)
      .value("e5m2", li::Compute::e5m2)
      .value("int8", li::Compute::int8)
      .value("fp32", li::Compute::fp32)
      .finalize();
  py::class_<li::Sizes>(m, "Sizes")
      .def(py::init([](li::Layout layout, int64_t Nq, int64_t N, int64_t Lq, int64_t Ld, int64_t d) {
             return li::Sizes{layout, Nq, N, Lq, Ld, d};
           }),
           py::arg("layout"), py::arg("Nq"), py::arg("N"), py::arg("Lq"), py::arg("Ld"), py::arg("d"))
      .def_readonly("Lq", &li::Sizes::Lq)
      .def_readonly("Ld", &li::Sizes::Ld)
      .def_readonly("d", &li::Sizes::d);

  py::class_<li::Device>(m, "Device")
      .def_readonly("capability", &li::Device::capability)
      .def_readonly("sm_count", &li::Device::sm_count)
      .def_readonly("smem_per_sm", &li::Device::smem_per_sm)
      .def_readonly("smem_per_block", &li::Device::smem_per_block);
  m.def("device_of_capability", &li::device_of_capability, py::arg("capability"), py::arg("sm_count"),
        py::arg("geforce") = false);
  py::class_<li::Rates>(m, "Rates")
      .def_readonly("fp16", &li::Rates::fp16)
      .def_readonly("int8", &li::Rates::int8)
      .def_readonly("fp8", &li::Rates::fp8)
      .def_readonly("tf32", &li::Rates::tf32)
      .def_readonly("ffma", &li::Rates::ffma);
  m.def("rates_of", &li::rates_of, py::arg("device"));

  py::class_<li::ForwardPlan>(m, "ForwardPlan")
      .def_property_readonly("kernel", [](const li::ForwardPlan& plan) { return plan.kernel->name; })
      .def_readonly("compute", &li::ForwardPlan::compute)
      .def_readonly("rows", &li::ForwardPlan::rows)
      .def_readonly("tokens", &li::ForwardPlan::tokens)
      .def_readonly("k_chunks", &li::ForwardPlan::k_chunks)
      .def_readonly("stages", &li::ForwardPlan::stages)
      .def_readonly("num_splits", &li::ForwardPlan::num_splits)
      .def_readonly("lpt", &li::ForwardPlan::lpt)
      .def_readonly("smem_bytes", &li::ForwardPlan::smem_bytes)
      .def_readonly("blocks_per_sm", &li::ForwardPlan::blocks_per_sm)
      .def_readonly("row_tiles", &li::ForwardPlan::row_tiles)
      .def_readonly("work_tiles", &li::ForwardPlan::work_tiles)
      .def_readonly("grid", &li::ForwardPlan::grid)
      .def_readonly("partials", &li::ForwardPlan::partials)
      .def_readonly("many_rows", &li::ForwardPlan::many_rows)
      .def_readonly("teams", &li::ForwardPlan::teams)
      .def_readonly("members", &li::ForwardPlan::members)
      .def_readonly("cluster", &li::ForwardPlan::cluster)
      .def_readonly("stream_q", &li::ForwardPlan::stream_q)
      .def_readonly("docs", &li::ForwardPlan::docs)
      .def_readonly("doc_columns", &li::ForwardPlan::doc_columns)
      .def_readonly("masked", &li::ForwardPlan::masked)
      .def_readonly("compacted", &li::ForwardPlan::compacted);
  py::class_<li::ForwardTraits>(m, "ForwardTraits")
      .def(py::init([](li::Dtype dtype, li::Precision precision, bool masked, bool scaled,
                       bool tma_compatible, bool packed) {
             return li::ForwardTraits{.dtype = dtype,
                                      .precision = precision,
                                      .masked = masked,
                                      .packed = packed,
                                      .scaled = scaled,
                                      .tma_compatible = tma_compatible};
           }),
           py::arg("dtype") = li::Dtype::bf16, py::arg("precision") = li::Precision::highest,
           py::arg("masked") = false, py::arg("scaled") = false, py::arg("tma_compatible") = true,
           py::arg("packed") = false);
  m.def("plan_forward", &li::plan_forward, py::arg("sizes"), py::arg("traits"), py::arg("device"));

  py::class_<li::BackwardPlan>(m, "BackwardPlan")
      .def_readonly("method", &li::BackwardPlan::method)
      .def_readonly("gather_grid", &li::BackwardPlan::gather_grid)
      .def_readonly("single_query", &li::BackwardPlan::single_query)
      .def_readonly("segments", &li::BackwardPlan::segments)
      .def_readonly("tile_tokens", &li::BackwardPlan::tile_tokens)
      .def_readonly("tiles", &li::BackwardPlan::tiles)
      .def_readonly("list_capacity", &li::BackwardPlan::list_capacity)
      .def_readonly("chunk", &li::BackwardPlan::chunk)
      .def_readonly("compact", &li::BackwardPlan::compact)
      .def_readonly("gather_smem_bytes", &li::BackwardPlan::gather_smem_bytes)
      .def_readonly("lowmem_smem_bytes", &li::BackwardPlan::lowmem_smem_bytes);
  m.def("plan_backward", &li::plan_backward, py::arg("sizes"), py::arg("dtype"), py::arg("vectors"),
        py::arg("normalize"), py::arg("method"), py::arg("device"));

  py::class_<li::LoneQueryPlan>(m, "LoneQueryPlan")
      .def_readonly("slices", &li::LoneQueryPlan::slices)
      .def_readonly("slice_dims", &li::LoneQueryPlan::slice_dims)
      .def_readonly("grid", &li::LoneQueryPlan::grid)
      .def_readonly("smem_bytes", &li::LoneQueryPlan::smem_bytes);
  py::class_<li::IncidencePlan>(m, "IncidencePlan")
      .def_readonly("gathers", &li::IncidencePlan::gathers)
      .def_readonly("tma", &li::IncidencePlan::tma)
      .def_readonly("steps", &li::IncidencePlan::steps)
      .def_readonly("units", &li::IncidencePlan::units)
      .def_readonly("slices", &li::IncidencePlan::slices)
      .def_readonly("slice_dims", &li::IncidencePlan::slice_dims)
      .def_readonly("block_docs", &li::IncidencePlan::block_docs)
      .def_readonly("block_rows", &li::IncidencePlan::block_rows)
      .def_readonly("rows", &li::IncidencePlan::rows)
      .def_readonly("cluster", &li::IncidencePlan::cluster)
      .def_readonly("stages", &li::IncidencePlan::stages)
      .def_readonly("grid", &li::IncidencePlan::grid)
      .def_readonly("smem_bytes", &li::IncidencePlan::smem_bytes);
  py::class_<li::ShortDocsPlans>(m, "ShortDocsPlans")
      .def_readonly("lone", &li::ShortDocsPlans::lone)
      .def_readonly("grad_q", &li::ShortDocsPlans::grad_q)
      .def_readonly("grad_d", &li::ShortDocsPlans::grad_d);
  m.def("plan_short_docs", &li::plan_short_docs, py::arg("sizes"), py::arg("dtype"), py::arg("aligned"),
        py::arg("normalize"), py::arg("method"), py::arg("device"));

  m.def("explain", py::overload_cast<const li::Sizes&, const li::ForwardPlan&>(&li::explain));
  m.def("explain", py::overload_cast<const li::Sizes&, const li::BackwardPlan&>(&li::explain));
}
