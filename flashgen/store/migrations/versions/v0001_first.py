"""The first schema: targets, kernels, measurements, and the views over them."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

# Everything known of each trial in one row: what to query by hand.
RECORDS = """
CREATE VIEW records AS
SELECT m.id, m.target, m.target_name, k.op, k.spec, m.bucket, k.family, k.config, k.admission,
       m.status, m.median_us, m.min_us, m.max_us, m.passes, m.source, m.max_error, m.reason,
       m.registers, m.spill_bytes, m.shared_bytes,
       m.batch, m.heads, m.kv_heads, m.q_len, m.k_len, m.params_json, m.density,
       k.hash, m.flashgen, m.triton, m.torch, m.driver, m.created_at
FROM measurements m JOIN kernels k ON k.id = m.kernel
"""

# Of several records of one kernel (config, hash, triton version) and workload the newest measured one counts.
# `wrong`: how many workloads of the spec this kernel was wrong or unstable on; then it is trusted nowhere.
VERDICTS = """
CREATE VIEW verdicts AS
SELECT newest.*,
       SUM(CASE WHEN status IN ('WRONG', 'UNSTABLE') THEN 1 ELSE 0 END)
           OVER (PARTITION BY target, spec, family, config, hash, triton) AS wrong
FROM (
    SELECT records.*,
           ROW_NUMBER() OVER (
               PARTITION BY target, spec, family, config, hash, triton,
                            batch, heads, kv_heads, q_len, k_len, params_json
               ORDER BY CASE source WHEN 'model' THEN 1 ELSE 0 END, created_at DESC, id DESC
           ) AS age
    FROM records
) newest
WHERE age = 1
"""

# The fastest of each workload and admission class. Times of different sizes do not compare, so a bucket
# with several workloads has a row for each. Whether a kernel is today's cannot be seen in SQL.
BEST = """
CREATE VIEW best AS
SELECT target, target_name, spec, bucket, family, config, admission, median_us, source, max_error,
       batch, heads, kv_heads, q_len, k_len, params_json, hash, triton, created_at, id
FROM (
    SELECT verdicts.*,
           ROW_NUMBER() OVER (
               PARTITION BY target, spec, batch, heads, kv_heads, q_len, k_len, params_json, admission
               ORDER BY CASE source WHEN 'model' THEN 1 ELSE 0 END, median_us, config, id
           ) AS place
    FROM verdicts
    WHERE status = 'OK' AND wrong = 0
) placed
WHERE place = 1
"""


def upgrade() -> None:
    row_id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "targets",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("vendor", sa.Text, nullable=False),
        sa.Column("arch", sa.BigInteger, nullable=False),
        sa.Column("sm_count", sa.BigInteger, nullable=False),
        sa.Column("shared_per_block", sa.BigInteger, nullable=False),
        sa.Column("l2_mib", sa.BigInteger, nullable=False),
        sa.Column("bandwidth", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "kernels",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("family", sa.Text, nullable=False),
        sa.Column("op", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("admission", sa.Text, nullable=False),
        sa.Column("spec_json", sa.Text, nullable=False),
        sa.Column("config_json", sa.Text, nullable=False),
    )
    op.create_index("kernels_by_spec", "kernels", ["spec"])
    op.create_table(
        "measurements",
        sa.Column("id", row_id, primary_key=True, autoincrement=True),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("target", sa.Text, sa.ForeignKey("targets.key"), nullable=False),
        sa.Column("target_name", sa.Text, nullable=False),
        sa.Column("kernel", sa.Text, sa.ForeignKey("kernels.id"), nullable=False),
        sa.Column("bucket", sa.Text, nullable=False),
        sa.Column("batch_code", sa.Integer, nullable=False),
        sa.Column("q_code", sa.Integer, nullable=False),
        sa.Column("k_code", sa.Integer, nullable=False),
        sa.Column("batch", sa.BigInteger, nullable=False),
        sa.Column("heads", sa.BigInteger, nullable=False),
        sa.Column("kv_heads", sa.BigInteger, nullable=False),
        sa.Column("q_len", sa.BigInteger, nullable=False),
        sa.Column("k_len", sa.BigInteger, nullable=False),
        sa.Column("params_json", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("median_us", sa.Double),
        sa.Column("min_us", sa.Double),
        sa.Column("max_us", sa.Double),
        sa.Column("passes", sa.BigInteger, nullable=False),
        sa.Column("max_error", sa.Double),
        sa.Column("registers", sa.BigInteger),
        sa.Column("spill_bytes", sa.BigInteger),
        sa.Column("shared_bytes", sa.BigInteger),
        sa.Column("density", sa.Text, nullable=False),
        sa.Column("flashgen", sa.Text, nullable=False),
        sa.Column("triton", sa.Text, nullable=False),
        sa.Column("torch", sa.Text, nullable=False),
        sa.Column("driver", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.UniqueConstraint("digest", name="measurements_once"),
    )
    op.create_index("measurements_by_kernel", "measurements", ["kernel", "target"])
    for view in (RECORDS, VERDICTS, BEST):
        op.execute(view.strip())
