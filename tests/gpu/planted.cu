// One fault of each kind that compute-sanitizer is to find: `planted memcheck` writes behind an array, and in `planted
// racecheck` all threads of a CTA write one word of shared memory.
#include <cstring>

__global__ void write(int* array) { array[threadIdx.x] = 1; }

__global__ void race(int* array) {
  __shared__ volatile int word;  // or no store would be left
  word = threadIdx.x;
  array[threadIdx.x] = word;
}

int main(int count, char** arguments) {
  int* array;
  if (count < 2 || cudaMalloc(&array, 64 * sizeof(int)) != cudaSuccess) return 2;
  if (std::strcmp(arguments[1], "memcheck") == 0) {
    write<<<1, 65>>>(array);
  } else {
    race<<<1, 64>>>(array);
  }
  return cudaDeviceSynchronize() != cudaSuccess;
}
