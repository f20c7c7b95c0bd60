// lockstep_worker: see worker_main.h and --help.
#include "worker/worker_main.h"

int main(int argc, char** argv) { return lockstep::WorkerMain(argc, argv); }
