"""A client that is not ours: stubs generated from the shipped protos, and Debian's grpcio.

Usage: client_test.py ADDRESS. Streams a completion, checks it against the unary call, checks health with
the stock health protocol, and reads an error's details.
"""

import sys

import grpc

from proto import error_details_pb2, health_pb2, health_pb2_grpc
from proto import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc


def error_reason(error):
    for key, value in error.trailing_metadata():
        if key == "grpc-status-details-bin":
            status = error_details_pb2.Status.FromString(value)
            for detail in status.details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return info.reason
    return ""


def main(address):
    channel = grpc.insecure_channel(address)
    stub = inference_pb2_grpc.InferenceServiceStub(channel)

    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ["", "liveness", "lockstep.inference.v1.InferenceService", "worker/0"]:
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        assert answer.status == serving, (service, answer)

    models = model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest())
    assert len(models.models) == 1 and models.models[0].ready, models

    request = inference_pb2.GenerateRequest(text="The capital of France is")
    request.sampling.temperature = 0
    request.sampling.max_tokens = 12
    text = ""
    finished = None
    sequence = 0
    for event in stub.Generate(request, timeout=60):
        sequence += 1
        assert event.sequence == sequence, event
        if event.HasField("delta"):
            text += event.delta.text
        if event.HasField("finished"):
            finished = event.finished
    assert finished is not None
    assert text.startswith(" Paris.\nThe capital of Germany is Berlin."), repr(text)

    once = stub.GenerateOnce(request, timeout=60)
    assert once.outputs[0].text == text, once
    assert once.outputs[0].finished.determinism_digest == finished.determinism_digest

    try:
        stub.GenerateOnce(inference_pb2.GenerateRequest(text=""), timeout=60)
        raise AssertionError("an empty prompt was accepted")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, error
        assert error_reason(error) == "PROMPT_EMPTY", error

    print("python client: ok,", repr(text))


if __name__ == "__main__":
    main(sys.argv[1])
