# late_interaction_gpu_architectures(VARIABLE): what to build for, by the rule of setup.py: one architecture for each
# generation of GPUs on this machine, as machine code for X.0 runs on every X.Y, and 8.9, whose code alone has its fp8;
# without a GPU, for every GPU that nvcc knows.
function(late_interaction_gpu_architectures variable)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE told
    ERROR_QUIET
    RESULT_VARIABLE status)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE known)
  set(found "")
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${told}")
    foreach(capability IN LISTS capabilities)
      string(REGEX MATCH "^[0-9]+" major ${capability})
      string(REPLACE "." "" number ${capability})
      if(capability VERSION_LESS 7.5)
        continue()
      elseif(number EQUAL 75 OR number EQUAL 89)
        list(APPEND found ${number}-real)
      elseif(major EQUAL 9)
        list(APPEND found 90a-real)
      elseif(known MATCHES "compute_${major}0(\n|$)")
        list(APPEND found ${major}0-real)
      else()
        list(APPEND found 90-virtual) # the driver compiles it for newer GPUs
      endif()
    endforeach()
    list(REMOVE_DUPLICATES found)
  endif()
  if(NOT found)
    foreach(architecture 75-real 80-real 89-real 90a-real 100-real 120-real 90-virtual)
      string(REGEX MATCH "^[0-9]+" number ${architecture})
      if(known MATCHES "compute_${number}(\n|$)")
        list(APPEND found ${architecture})
      endif()
    endforeach()
  endif()
  set(${variable} "${found}" PARENT_SCOPE)
endfunction()
