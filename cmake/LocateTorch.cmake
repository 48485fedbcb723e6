# The targets torch_cpu and c10, which are all of PyTorch that late_interaction links.
#
# find_package(Torch) gives them. A CUDA build of PyTorch has that package insist on the whole CUDA toolkit,
# of which nothing is needed here, so beside libtorch_cuda the two targets are made from the libraries alone.
if(NOT TARGET torch_cpu)
  find_file(LATE_INTERACTION_TORCH_CONFIG TorchConfig.cmake PATH_SUFFIXES Torch share/cmake/Torch REQUIRED)
  cmake_path(GET LATE_INTERACTION_TORCH_CONFIG PARENT_PATH _torch)
  cmake_path(SET _torch NORMALIZE "${_torch}/../../..")
  if(EXISTS "${_torch}/lib/libtorch_cuda.so")
    foreach(_name torch_cpu c10)
      add_library(${_name} SHARED IMPORTED)
      set_target_properties(
        ${_name}
        PROPERTIES IMPORTED_LOCATION "${_torch}/lib/lib${_name}.so" INTERFACE_INCLUDE_DIRECTORIES
                                                                    "${_torch}/include")
    endforeach()
    set_property(TARGET torch_cpu PROPERTY INTERFACE_LINK_LIBRARIES c10)
  else()
    find_package(Torch REQUIRED)
  endif()
  unset(_torch)
endif()
