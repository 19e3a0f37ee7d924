"""Does the model of on-chip bytes agree with the compiler? Many kernels compiled without a GPU."""
