#!/bin/sh
# trim_pyarrow.sh FOLDER: what parquet files of a local disk do not need leaves an installed pyarrow: Arrow Flight, the
# filesystem of S3, headers, sources, tests, and two copies of one library.
set -eu
cd "$1"
rm -rf include includes src tests
rm -f ./*.pyx ./*.pxi ./*.pxd ./*flight*.so* flight.py ./*_s3*.so*
# The linker asks for libarrow_python.so.NUMBER alone; a wheel has no links, so it brings the file three times.
rm -f libarrow_python.so libarrow_python.so.*.*
