"""An agent under AWS's own decorator: each line of its input is an invocation's payload, each line of its output the answer."""

import json
import sys

import requests
from sagemaker.core.token_generator import generate_token
from sagemaker.train.rft import make_inference_headers, sagemaker_rft_handler


@sagemaker_rft_handler
def answer(payload):
    metadata = payload["metadata"]
    headers = {"authorization": f"Bearer {generate_token(metadata['region'])}", **make_inference_headers(metadata)}
    asked = {"model": "default", "messages": [{"role": "user", "content": payload["prompt"]}]}
    reply = requests.post(f"{metadata['endpoint']}/v1/chat/completions", json=asked, headers=headers, timeout=30)
    reply.raise_for_status()
    return {"reward": float(reply.json()["choices"][0]["message"]["content"] == "4")}


for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), flush=True)
