"""Install commands for missing packages, for all error messages."""

from __future__ import annotations

from dataclasses import dataclass

BUILD_HOROVOD = "hvd-estimators build-horovod"
"""Command that builds and installs Horovod."""

# No package index has this package, and on an index another could take its name.
SOURCE = "<clone or wheel of hvd_estimators>"
"""Stands for the path that pip installs this package from."""

INSTALL = {
    "adlfs": f'pip install "{SOURCE}[azure]"',
    "comet_ml": "pip install comet_ml",
    "deltalake": f'pip install "{SOURCE}[tables]"',
    "gcsfs": f'pip install "{SOURCE}[gcs]"',
    "hdfs_native": f'pip install "{SOURCE}[hdfs]"',
    "horovod": BUILD_HOROVOD,
    "keras": f'pip install --upgrade "{SOURCE}[keras]"',
    "lightning": f'pip install --upgrade "{SOURCE}[lightning]"',
    "matplotlib": f'pip install "{SOURCE}[plot]"',
    "mlflow": f'pip install "{SOURCE}[mlflow]"',
    "ocifs": "pip install ocifs",
    "onnx": f'pip install "{SOURCE}[onnx]"',
    "ossfs": "pip install ossfs",
    "petastorm": (f'pip install "{SOURCE}[petastorm]" && pip install --no-deps petastorm==0.13.1'),
    "pyiceberg": f'pip install "{SOURCE}[tables]"',
    "s3fs": f'pip install "{SOURCE}[s3]"',
    "tensorflow": f'pip install --upgrade "{SOURCE}[keras]"',
    "torch": f'pip install --upgrade "{SOURCE}[torch]"',
    "wandb": "pip install wandb",
}
"""Package to the command that installs or upgrades it."""

INSTALL["lightning_utilities"] = INSTALL["lightning"]  # the first import of Lightning that fails

INSTALL_A_FRAMEWORK = f'pip install "{SOURCE}[torch]", or [keras]'
"""Command to run if no framework is installed."""


@dataclass(frozen=True)
class Connector:
    """Spark connector for one kind of storage.

    Attributes
    ----------
    package : str
        Maven coordinates; ``{hadoop}`` stands for the version of Spark's own Hadoop.
    settings : str
        Settings that the connector needs.
    """

    package: str
    settings: str

    def remedy(self, hadoop: str) -> str:
        """Return the advice for a missing connector, given the version of Spark's Hadoop."""
        package = self.package.format(hadoop=hadoop)
        return f"Start Spark with spark.jars.packages={package} (or its jars). {self.settings}"


S3A = Connector(
    "org.apache.hadoop:hadoop-aws:{hadoop}",
    "Set what it needs when Spark is started: spark.hadoop.fs.s3a.access.key and "
    "spark.hadoop.fs.s3a.secret.key (with a role or a profile: "
    "spark.hadoop.fs.s3a.aws.credentials.provider); for a server that is not Amazon's "
    "spark.hadoop.fs.s3a.endpoint and spark.hadoop.fs.s3a.path.style.access=true. The store's "
    "storage_options are for Python alone.",
)
GCS = Connector(
    "com.google.cloud.bigdataoss:gcs-connector:hadoop3-2.2.26",
    "Set what it needs when Spark is started: spark.hadoop.fs.gs.impl="
    "com.google.cloud.hadoop.fs.gcs.GoogleHadoopFileSystem and credentials "
    "(spark.hadoop.google.cloud.auth.service.account.json.keyfile). The store's storage_options "
    "are for Python alone.",
)
AZURE = Connector(
    "org.apache.hadoop:hadoop-azure:{hadoop}",
    "Set what it needs when Spark is started: "
    "spark.hadoop.fs.azure.account.key.<account>.dfs.core.windows.net, or "
    "spark.hadoop.fs.azure.account.auth.type and what belongs to it. The store's storage_options "
    "are for Python alone.",
)
OCI = Connector(
    "com.oracle.oci.sdk:oci-hdfs-connector:3.3.4.1.5.0",
    "Set what it needs when Spark is started: spark.hadoop.fs.oci.client.*.",
)
OSS = Connector(
    "org.apache.hadoop:hadoop-aliyun:{hadoop}",
    "Set what it needs when Spark is started: spark.hadoop.fs.oss.endpoint, "
    "spark.hadoop.fs.oss.accessKeyId and spark.hadoop.fs.oss.accessKeySecret.",
)
