FROM tool@kit AS unit0
USER 0
RUN --network=none \
  --mount=type=bind,from=source,target=/spark-build/source \
  --mount=type=bind,from=headers0,target=/spark-build/headers0 \
  --mount=type=bind,source=unit0.sh,target=/spark-build/run.sh \
  ["/bin/sh", "/spark-build/run.sh"]
FROM tool@kit AS unit1
USER 0
RUN --network=none \
  --mount=type=bind,from=source,target=/spark-build/source \
  --mount=type=bind,from=headers0,target=/spark-build/headers0 \
  --mount=type=bind,source=unit1.sh,target=/spark-build/run.sh \
  ["/bin/sh", "/spark-build/run.sh"]
FROM unit0 AS unit2
RUN --network=none \
  --mount=type=bind,from=source,target=/spark-build/source \
  --mount=type=bind,from=headers0,target=/spark-build/headers0 \
  --mount=type=bind,source=unit2.sh,target=/spark-build/run.sh \
  ["/bin/sh", "/spark-build/run.sh"]
FROM scratch
COPY --from=unit0 /spark-build/out/unit0/ /unit0/
COPY --from=unit1 /spark-build/out/unit1/ /unit1/
COPY --from=unit2 /spark-build/out/unit2/ /unit2/
