// The smallest user of pacer::kernels: a sum of squares on plain memory. It needs none of LibTorch's headers.
#include <cstdio>

#include <pacer/kernels/norm.h>

int main() {
  const float elements[] = {3, 4};
  const double found = pacer::kernels::sum_of_squares_cpu(pacer::kernels::GradientType::f32, elements, 2);
  std::printf("sum of squares %.1f, expected 25.0\n", found);
  return found == 25 ? 0 : 1;
}
