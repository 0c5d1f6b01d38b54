# What a toolkit image has to compile with; run in it, the answers are files.  No answer is a
# missing file: what that means is decided by who reads them.
out=/spark-build/out/probe
mkdir -p $out/lib
nvcc=$(command -v nvcc) || nvcc=/usr/local/cuda/bin/nvcc
if [ -x "$nvcc" ]; then
  echo "$nvcc" > $out/nvcc
  "$nvcc" --version > $out/nvcc-version 2>&1
  "$nvcc" --dryrun -shared x.o > $out/nvcc-dryrun 2>&1
  root=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
  [ -f "$root/include/cusparse.h" ] && : > $out/library-headers
  for folder in $(sed -n 's/^.*LIBRARIES=//p' $out/nvcc-dryrun | tr -d '"' | tr ' ' '\n' |
                  sed -n 's/^-L//p'); do
    for file in "$folder"/libcudart.so "$folder"/libcudart.so.[0-9][0-9]; do
      [ -f "$file" ] && cp -L "$file" $out/lib/
    done
  done
fi
if command -v g++ > $out/host; then
  g++ --version > $out/host-version 2>&1
  cp -L "$(g++ -print-file-name=libc.so.6)" $out/lib/
fi
exit 0
