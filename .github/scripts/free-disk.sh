#!/usr/bin/env bash
# Remove toolchains that hosted runners carry and this job does not use; a Docker build of a vLLM
# image needs their space.  The first argument is the root of the file system (default: /).
set -euo pipefail
root=${1:-/}
before=$(df --output=avail -BM "$root" | tail -n 1)
for folder in usr/local/lib/android usr/share/dotnet opt/ghc usr/local/.ghcup \
  opt/hostedtoolcache/CodeQL usr/share/swift usr/local/share/powershell; do
  [ ! -d "${root%/}/$folder" ] || rm -rf --one-file-system -- "${root%/}/${folder:?}"
done
echo "free disk: $before -> $(df --output=avail -BM "$root" | tail -n 1)"
