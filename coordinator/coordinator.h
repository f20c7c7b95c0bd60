// Coordinator: puts the public server, the worker group, the tokenizer and the engine together.
//
// Start listens at once, so that clients get MODEL_LOADING and health NOT_SERVING while Load runs.
// It never opens weights: what it knows of the model comes from the workers, the tokenizer aside.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/capacity.h"
#include "coordinator/edge_options.h"
#include "coordinator/engine.h"
#include "coordinator/generation_table.h"
#include "coordinator/group/fault.h"
#include "coordinator/group/rank_link.h"
#include "coordinator/group/worker_group.h"
#include "coordinator/journal/journal.h"
#include "coordinator/step_transport.h"
#include "proto/worker.pb.h"

namespace lockstep {

struct CoordinatorOptions {
  CoordinatorOptions() { group.recover = true; }

  std::string model_path;         // a directory, as coordinator and workers see it
  std::string served_model_name;  // empty: the last part of model_path
  std::vector<std::string> model_aliases;
  std::vector<std::string> workers;  // gRPC targets, rank order; their number is the TP size
  std::string host = "127.0.0.1";
  int port = 50051;  // 0: any free one
  EdgeOptions edges;
  worker::v1::ActivationDType activation_dtype = worker::v1::ACTIVATION_BF16;
  worker::v1::ActivationQuant activation_quant = worker::v1::ACTIVATION_QUANT_NONE;
  CapacityRequest capacity;
  // Policies of the engine; its limits are overwritten by what `capacity` leads to, its names by
  // what is served.
  EngineOptions engine;
  GenerationTableOptions generations;
  JournalOptions journal;  // no directory: no journal
  // Patience, spares and budget of the group; its addresses, model and hooks are set from the rest.
  WorkerGroupOptions group;
  // Makes the launcher of the workers that this process may start and end; empty: none.
  std::function<std::unique_ptr<WorkerLauncher>(RankEventSink)> launcher;
  std::string state_dir;  // empty: the term is taken from the clock, and epochs from the workers
  // The health name "liveness" fails when the step loop has not come round for longer.
  absl::Duration liveness_bound = absl::Seconds(30);
  // Injected by tests: a transport around the given one, which outlives it.
  std::function<std::unique_ptr<StepTransport>(StepTransport* transport)> wrap_transport;
};

class Coordinator {
 public:
  // Opens the journal and listens. FAILED_PRECONDITION when the address cannot be had; errors of
  // the journal as Journal::Open.
  static absl::StatusOr<std::unique_ptr<Coordinator>> Start(const CoordinatorOptions& options);
  ~Coordinator();

  int port() const;
  // What clients call: "host:port" or "unix:/path".
  std::string address() const;
  // 0: there is none.
  int admin_port() const;
  int metrics_port() const;

  // Loads the model on every rank and makes the server ready; prints progress each 5 s. Once. After
  // a failure the server goes on answering, with the cause.
  absl::Status Load();

  // OK unless loading failed, or the workers cannot be brought together any more: then why. The
  // server goes on answering, with the cause.
  absl::Status Healthy() const;

  // The process answers and its step loop came round recently; true while the model is loading.
  bool Alive() const;
  // How the server is doing, for people; one line.
  std::string StatusLine() const;

  // Begins to drain for good: new requests are refused, readiness is withdrawn, running ones go on.
  void Drain();
  // True when nothing is queued or running.
  bool Idle() const;

  // Ends what runs, every call with a status, and all the threads. Idempotent. Not while Load runs.
  void Stop();
  // Ends the calls of clients alone, for a process that is to end while Load runs. Nothing can be
  // asked of the server from then on.
  void EndCalls();

  // What is served and with which limits, for people; several lines. After Load.
  std::string Describe() const;

  // The last faults, oldest first.
  std::vector<FaultRecord> Faults() const;

  // After Load; for tests and evaluation.
  Engine* engine();
  WorkerGroup* workers();

 private:
  class Impl;
  explicit Coordinator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
