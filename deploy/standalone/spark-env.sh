# conf/spark-env.sh of every machine: Spark's processes start with these variables.
export PYSPARK_PYTHON=/opt/environment/bin/python
export SPARK_MASTER_PORT=7077
export SPARK_WORKER_PORT=7078
