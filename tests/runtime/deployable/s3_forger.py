"""An agent whose sessions try to get at other sessions' objects in the store they were given."""

import json
import os
import urllib.error
import urllib.request

import boto3
from bedrock_agentcore.runtime import BedrockAgentCoreApp
from botocore.config import Config
from botocore.exceptions import ClientError

app = BedrockAgentCoreApp()
AT_LOAD = boto3.client("s3", config=Config(retries={"total_max_attempts": 1}))  # as the published toolkit makes it


def tried(client, operation, arguments):
    try:
        answer = getattr(client, operation)(**arguments)
    except ClientError as e:
        return e.response["Error"].get("Code")
    body = answer.get("Body")
    return body.read().decode() if body is not None else "done"


def unsigned(method, path):
    request = urllib.request.Request(os.environ["AWS_ENDPOINT_URL_S3"] + path, method=method)
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as e:
        return e.code


@app.entrypoint
def main(payload):
    clients = {
        "own": lambda: boto3.client("s3"),
        "at load": lambda: AT_LOAD,
        "placeholder": lambda: boto3.client("s3", aws_access_key_id="local", aws_secret_access_key="local"),
    }
    answer = {}
    for name, (client, operation, arguments) in payload.get("calls", {}).items():
        answer[name] = tried(clients[client](), operation, arguments)
    for name, (method, path) in payload.get("unsigned", {}).items():
        answer[name] = unsigned(method, path)
    if payload.get("key"):
        answer["key"] = os.environ["AWS_ACCESS_KEY_ID"]
        answer["signed at load"] = AT_LOAD.generate_presigned_url("get_object", Params={"Bucket": "b", "Key": "k"})
    return json.loads(json.dumps(answer))


if __name__ == "__main__":
    app.run()
