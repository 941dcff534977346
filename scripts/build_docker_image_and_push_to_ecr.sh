#!/bin/sh
# Build an image for AgentCore (linux/arm64) and push it to ECR; the repository is made if it is absent.
#
#     scripts/build_docker_image_and_push_to_ecr.sh --dockerfile=Dockerfile --tag=v1 --context=. [--platform=linux/arm64] [--dry-run]
#
# AWS_REGION, AWS_ACCOUNT and ECR_REPO_NAME come from the environment, or from .env in the current folder (see .env.example).
# `agentcore-rl deploy` does all of this, and makes role and runtime, too.
set -eu

dockerfile=Dockerfile tag='' context=. platform=linux/arm64 rehearse=''
for option in "$@"; do
    case $option in
        --dockerfile=*) dockerfile=${option#*=} ;;
        --tag=*) tag=${option#*=} ;;
        --context=*) context=${option#*=} ;;
        --platform=*) platform=${option#*=} ;;
        --dry-run) rehearse=yes ;;
        *) echo "unknown option: $option" >&2; exit 2 ;;
    esac
done

# Lines of .env are read, never run. What the environment has already wins.
setting() {
    eval "found=\${$1:-}"
    if [ -z "$found" ] && [ -f .env ]; then
        found=$(sed -n "s/^\(export \)\{0,1\}$1=//p" .env | tail -n 1 | sed "s/^[\"']//; s/[\"']\$//")
    fi
    [ -n "$found" ] || { echo "$1 is not set: export it, or write it to .env (see .env.example)" >&2; exit 2; }
    printf '%s' "$found"
}
region=$(setting AWS_REGION)
account=$(setting AWS_ACCOUNT)
name=$(setting ECR_REPO_NAME)
[ -n "$tag" ] || { echo "--tag=TAG is needed" >&2; exit 2; }
[ -f "$dockerfile" ] || { echo "there is no $dockerfile" >&2; exit 2; }

if command -v docker >/dev/null 2>&1; then engine=docker; else engine=podman; fi
registry=$account.dkr.ecr.$region.amazonaws.com
image=$registry/$name:$tag

run() {
    if [ -n "$rehearse" ]; then printf 'would run:'; printf ' %s' "$@"; echo; else "$@"; fi
}

if [ -n "$rehearse" ] || ! aws ecr describe-repositories --region "$region" --repository-names "$name" >/dev/null 2>&1; then
    run aws ecr create-repository --region "$region" --repository-name "$name"
fi
run "$engine" build --platform "$platform" --file "$dockerfile" --tag "$image" "$context"
if [ -n "$rehearse" ]; then
    echo "would run: aws ecr get-login-password --region $region | $engine login --username AWS --password-stdin $registry"
else
    aws ecr get-login-password --region "$region" | "$engine" login --username AWS --password-stdin "$registry"
fi
run "$engine" push "$image"
echo "$image"
