CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, machine TEXT NOT NULL, revision TEXT NOT NULL,
    unfinished TEXT NOT NULL
);
CREATE TABLE results (
    run INTEGER NOT NULL REFERENCES runs, case_id TEXT NOT NULL, digest TEXT NOT NULL, nodeid TEXT NOT NULL,
    verdict TEXT NOT NULL, tokens_per_step INTEGER NOT NULL, ranks INTEGER NOT NULL, peak_reserved_bytes REAL,
    versions INTEGER NOT NULL REFERENCES texts, launches TEXT NOT NULL
);
CREATE INDEX results_of_a_case ON results (case_id);

ALTER TABLE results ADD COLUMN counts TEXT NOT NULL DEFAULT '{}';

ALTER TABLE runs ADD COLUMN project TEXT NOT NULL DEFAULT '';

ALTER TABLE results ADD COLUMN calibrations INTEGER REFERENCES texts;
