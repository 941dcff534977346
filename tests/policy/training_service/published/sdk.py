"""A client of training sessions by the SDK `sagemaker-train`, run in its own environment; prints what it got, as JSON."""

from __future__ import annotations

import json

from sagemaker.train.training_session import AdamParams, ModelPackageKind, ServiceClient

PROMPT = [300, 301, 302]
DATUM = {
    "modelInput": {"chunks": [{"tokens": PROMPT, "type": "encoded_text"}]},
    "lossFnInputs": {
        "target_tokens": {"data": [301, 302, 310], "dtype": "int64", "shape": [3]},
        **{
            name: {"data": data, "dtype": "float32", "shape": [3]}
            for name, data in (
                ("weights", [0.0, 0.0, 1.0]),
                ("logprobs", [0.0, 0.0, -2.0]),
                ("advantages", [0.0, 0.0, 1.0]),
            )
        },
    },
}


def main() -> None:
    service = ServiceClient(
        region="us-west-2", role_arn="arn:aws:iam::123456789012:role/trainer", s3_output_path="s3://bucket/run"
    )
    [base_model] = service.list_base_models()
    with service.create_lora_training_client(base_model) as training:
        passed = training.forward_backward([DATUM, DATUM], loss_fn="ppo", loss_fn_config={"clip_high_threshold": 2.0})
        stepped = training.optim_step(AdamParams(learning_rate=1e-3))
        state = training.save_state()
        metrics = {**passed.result().metrics, **stepped.result().metrics}
        sampler = training.save_weights_and_get_sampling_client()
        [sequence] = sampler.sample(PROMPT).result().sequences
        logprobs = sampler.compute_logprobs([*PROMPT, *sequence.tokens]).result()
        checkpoint = state.result().model_package_arn
        training.load_state_with_optimizer(checkpoint).result()
    with service.create_sampling_client(model_package_arn=sampler.model_package_arn) as alone:
        again = alone.compute_logprobs([*PROMPT, *sequence.tokens]).result()
    group = sampler.model_package_arn.split("/")[1]
    latest = service.get_latest_model_package(kind=ModelPackageKind.CHECKPOINT, model_package_group_arn=group)
    got = {
        "metrics": metrics,
        "sampled": sequence.logprobs,
        "logprobs": logprobs,
        "again": again,
        "checkpoint": checkpoint,
        "latest": latest.model_package_arn,
        "sessions": [session.status for session in service.list_sessions()],
    }
    print(json.dumps(got))


if __name__ == "__main__":
    main()
