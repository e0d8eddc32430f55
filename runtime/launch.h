// How this process was started: alone, or as one of several ranks by mpirun, srun or torchrun. Reads the environment,
// touches no network.
#pragma once
#include <string>

struct Launch {
  int rank = 0, ranks = 1;
  int local_rank = -1;         // among the ranks of this machine; -1 = not said
  std::string by;              // "mpirun", "srun", "torchrun"; "" = alone
  std::string master_address;  // where rank 0 listens; "" = not said: MPI tells it
  int master_port = 0;
};

// The first of these that is there: Open MPI's and MPICH's mpirun, srun, RANK and WORLD_SIZE as torchrun sets them.
// MASTER_ADDR and MASTER_PORT count for all. Throws UsageError for values that contradict each other.
Launch detect_launch();
