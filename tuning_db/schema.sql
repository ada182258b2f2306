-- The record database, schema version 0001: the sum of the migrations in flashgen/store.
-- Made by: python -m flashgen.store.upgrade > tuning_db/schema.sql

CREATE TABLE flashgen_schema (
	version_num VARCHAR(32) NOT NULL,
	CONSTRAINT flashgen_schema_pkc PRIMARY KEY (version_num)
);

CREATE TABLE targets (
	"key" TEXT NOT NULL,
	vendor TEXT NOT NULL,
	arch BIGINT NOT NULL,
	sm_count BIGINT NOT NULL,
	shared_per_block BIGINT NOT NULL,
	l2_mib BIGINT NOT NULL,
	bandwidth BIGINT NOT NULL,
	PRIMARY KEY ("key")
);

CREATE TABLE kernels (
	id TEXT NOT NULL,
	hash TEXT NOT NULL,
	family TEXT NOT NULL,
	op TEXT NOT NULL,
	spec TEXT NOT NULL,
	config TEXT NOT NULL,
	admission TEXT NOT NULL,
	spec_json TEXT NOT NULL,
	config_json TEXT NOT NULL,
	PRIMARY KEY (id)
);

CREATE INDEX kernels_by_spec ON kernels (spec);

CREATE TABLE measurements (
	id INTEGER NOT NULL,
	digest TEXT NOT NULL,
	target TEXT NOT NULL,
	target_name TEXT NOT NULL,
	kernel TEXT NOT NULL,
	bucket TEXT NOT NULL,
	batch_code INTEGER NOT NULL,
	q_code INTEGER NOT NULL,
	k_code INTEGER NOT NULL,
	batch BIGINT NOT NULL,
	heads BIGINT NOT NULL,
	kv_heads BIGINT NOT NULL,
	q_len BIGINT NOT NULL,
	k_len BIGINT NOT NULL,
	params_json TEXT NOT NULL,
	status TEXT NOT NULL,
	reason TEXT NOT NULL,
	source TEXT NOT NULL,
	median_us DOUBLE,
	min_us DOUBLE,
	max_us DOUBLE,
	passes BIGINT NOT NULL,
	max_error DOUBLE,
	registers BIGINT,
	spill_bytes BIGINT,
	shared_bytes BIGINT,
	density TEXT NOT NULL,
	flashgen TEXT NOT NULL,
	triton TEXT NOT NULL,
	torch TEXT NOT NULL,
	driver TEXT NOT NULL,
	created_at TEXT NOT NULL,
	PRIMARY KEY (id),
	CONSTRAINT measurements_once UNIQUE (digest),
	FOREIGN KEY(target) REFERENCES targets ("key"),
	FOREIGN KEY(kernel) REFERENCES kernels (id)
);

CREATE INDEX measurements_by_kernel ON measurements (kernel, target);

CREATE VIEW records AS
SELECT m.id, m.target, m.target_name, k.op, k.spec, m.bucket, k.family, k.config, k.admission,
       m.status, m.median_us, m.min_us, m.max_us, m.passes, m.source, m.max_error, m.reason,
       m.registers, m.spill_bytes, m.shared_bytes,
       m.batch, m.heads, m.kv_heads, m.q_len, m.k_len, m.params_json, m.density,
       k.hash, m.flashgen, m.triton, m.torch, m.driver, m.created_at
FROM measurements m JOIN kernels k ON k.id = m.kernel;

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
WHERE age = 1;

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
WHERE place = 1;
