"""What is refused as a secret, and what is not."""

from typing import Any

import pytest

from kfp_ddp.core.errors import InputError
from kfp_ddp.core.packed import WORD, pack, pack_text
from kfp_ddp.core.secrets import check_secrets

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
HARMLESS: list[Any] = [
    *("", "resnet50", "0.1", "1e-3", "gs://bucket/photos", "gs://bucket", "gs://my.bucket_1/a b/c"),
    *("s3://bucket/path/day=2026-01-01/part=3", "s3://bucket/a@2x.png", "az://container/a"),
    *("az://$web/a", "gcs://b/x", "abfss://data@account.dfs.core.windows.net/flowers"),
    *("hf://datasets/owner/name", "hf://datasets/owner/name@refs/convert/parquet", "hf:org/name"),
    *("synthetic://3x60@32?seed=7", "file:///data/ana@home/photos", "/data/ana@home", "~/a b/c@d"),
    *("https://data.example.com/m.jsonl", "https://data.example.com:8443/a?version=3&format=csv"),
    *("https://example.com/x?seed=1&raw=true#part", "https://example.com/?q=red+flowers&page=2"),
    *(
        "https://cdn.example.net/npm/package@1.2.3/x.js",
        "https://mlflow.example.com/#/experiments/1",
    ),
    *(
        "http://minio:9000/bucket",
        "http://[::1]:8080/x",
        "http://localhost:5000",
        "http://10.0.0.1/a",
    ),
    *(
        "https://xn--bcher-kva.example/%C3%BC/a%20b",
        "https://bücher.example/ü",
        "tcp://127.0.0.1:2222",
    ),
    *("models:/flowers@champion", "models:/flowers/3", "mlflow-artifacts:/1/2", "dbfs:/mnt/x"),
    *(
        "sqlite:///runs.db",
        "postgresql://db.example.com:5432/runs",
        "hdfs://nn:8020/x",
        "s3a://b/x",
    ),
    *("ssh://git@github.com/owner/name.git", "git@github.com:owner/name.git", "ray://head:10001"),
    *("http://$HOST:$PORT/x", "https://{{workflow.name}}.example.com/x", "gs://{bucket}/x"),
    *(r"C:\Users\ana@example\photos", "C:/Users/ana@example/photos", r"\\nas\share\a@b"),
    *("0 5 * * 1-5", "*/15 * * * *", "@daily", "12:30", "2026-01-01T12:30:00+01:00"),
    *("ana@example.com,ben@example.com", "mailto:ana@example.com", "Ana <ana@example.com>"),
    *("registry.example.com:5000/ml/trainer:1.2", f"registry:5000/trainer@sha256:{'0' * 64}"),
    *(
        f"trainer:1.2@sha256:{'0' * 64}",
        f"oci://registry:5000/a@sha256:{'0' * 64}",
        "quay.io/auth:v1",
    ),
    *("timm/vit_base_patch16_224.augreg_in21k", "network.py:build", "kfp_ddp.train:main", "a==1.0"),
    *(
        "a:1,b:2",
        "min:max",
        "2:4",
        "key: zone",
        "tokenizer: fast",
        "Why? Because a=b & c = d",
        "a?b",
    ),
    *("timm==1.0.0 --hash=sha256:" + "0" * 64, "max_tokens=512", "--tokenizer bert", "pad_token=0"),
    *(
        "python train.py --lr 0.1 --token-limit 5",
        "--password-file /run/secrets/p",
        "--token $TOKEN",
    ),
    *("sk-learn-pipeline-for-images", "hf_transfer", "Basic training of pictures", "skeleton key"),
    *("0123456789abcdef0123456789abcdef01234567", "AKIATA", "eyJ", "-----BEGIN CERTIFICATE-----"),
    *(["cat@home", "dog@work", "@eaDir/**", "*.jpg", "password", "token", "a:b"], ["--token"]),
    ["--index-url", "https://pypi.example.com/simple", "--name", "ana@example.com"],
    ["http://a:81/x", "ana@example.com"],
    {"bucket_secret": "kfp-ddp-bucket", "sign_key": "signing.pem", "champion_key": "champion.pem"},
    {"env_from_secrets": ["hf-token"], "packages_to_install": ["PyJWT==2.8.0", "jwt==1.*"]},
    *({"release": {name: "NAME"}} for name in ("sign_key", "sign_password", "registry_token")),
    {"release.sign_password": "NAME", "url": "https://a.example.com/?persistentId=doi:10.79/DVN/A"},
    {"notify_webhook": "HOOK", "notify_email": "ana@example.com", "image_pull_secrets": ["pull"]},
    {"job": {"env_from_secrets": ["tokens"], "labels": {"team": "auth"}, "claims": {"/a": "b:ro"}}},
    {"env": {"TOKENIZERS_PARALLELISM": "false", "NCCL_DEBUG": "INFO", "MAX_TOKENS": "4096"}},
    {"env": {"PRIMARY_KEY": "id", "HF_TOKEN_PATH": "/run/hf", "PUBLIC_KEY": "a", "MONKEY": "b"}},
    {"env": {"HF_TOKEN": "$(OTHER)", "SSH_AUTH_SOCK": "/run/ssh/agent", "USE_AUTH_TOKEN": "1"}},
    {"env_vars": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}}]},
    {"volumes": [{"name": "token", "secret": {"secretName": "token"}}]},
    {"tolerations": [{"key": "dedicated", "operator": "Equal", "value": "gpu"}]},
    {"image_key": "jpg", "label_key": "cls", "keys": ["a", "b"], "max_tokens": 100_000, "pw": 0.5},
    {"pw": "0.5", "token": "", "cls_token": "true", "num_tokens": "12345678", "secret_name": "a"},
    {"script": pack_text("token = 'a'\n", "script"), "args": [pack(b"a b", WORD)]},
]
P = "hunter2"
SECRET: list[Any] = [
    *(f"https://u:{P}@h", f"https://u:{P}@h.example.com/x", f"http://{P}@h", f"https://:{P}@h/x"),
    *(f"https://u:{P}/ss@h", f"https://u:{P}?ss@h", f"https://u:{P}#ss@h", f"https://u:{P} s@h"),
    *(f"https://u:12/{P}@h", f"https://u:12 {P}@h", f"https://u:12?{P}@h", f"https://u:?{P}@h"),
    *(f"https:/u:{P}@h", f"https:u:{P}@h", f"https:///u:{P}@h", f"//u:{P}@h", f"//u:{P}/s@h"),
    *(f"https:/{P}@h", f"https:\\\\u:{P}@h", f"HTTPS://U:{P}@H", f"https://u:{P}%40h/simple"),
    *(f"https://u%3A{P}%40h", f"https://u:{P}\uff20h", f"u:{P}@proxy:3128", f"u:{P}/s@proxy:3128"),
    *(f"u:{P}@registry.example.com/a:1", f"s3://key:{P}@bucket", f"gs://{P}@bucket/x"),
    *(f"ftp://u:{P}@h", f"postgresql://u:{P}@db/x", f"redis://:{P}@r:6379/0", f"git+ssh://u:{P}@h"),
    *(f"--index=https://u:{P}@h/simple", f"see https://u:{P}@h/x", f"a=1,b=http://u:{P}@h"),
    *(
        f"https://h.example.com/x?a=1&{key}={P}"
        for key in (
            *("sig", "auth", "code", "jwt", "hmac", "token", "access_token", "key", "api_key", "p"),
            *("password", "pass", "pw", "k", "sv", "Signature", "X-Amz-Signature", "credential"),
            *("X-Goog-Signature", "X-Amz-Credential", "AWSAccessKeyId", "%73ig", "x_token"),
        )
    ),
    *(f"https://h/x#access_token={P}", f"https://h/x;token={P}", f"https://h/x?a=1;token={P}"),
    *(f"https://h/x?{P}=", f"https://h/x%3Fsig%3D{P}", f"az://container/x?sv=1&sig={P}x=="),
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={P}==;EndpointSuffix=core",
    *(f"BlobEndpoint=https://a.blob.core.windows.net/;SharedAccessSignature=sv=1&sig={P}",),
    *(f"Endpoint=sb://a.example.com/;SharedAccessKey={P}", f"Server=a;User Id=b;Password={P}"),
    *(f"AWS_SECRET_ACCESS_KEY={P}", f"aws_secret_access_key = {P}", "AKIAIOSFODNN7EXAMPLE"),
    *(f"export HF_TOKEN={P}; run", f"password: {P}", f'{{"api_key": "{P}"}}', f"client_secret={P}"),
    *(f"Authorization: Bearer {P}", f"Bearer {JWT}", JWT, f"--token {P}", f"x.py --password={P}"),
    *(f"ghp_{'a1' * 18}", f"hf_{'aB' * 17}", f"glpat-{'a1' * 10}", f"xoxb-123456789012-{P}"),
    *(f"sk-{'a1' * 24}", f"AIza{'a' * 35}", f"github_pat_{'a1' * 20}", f"see ghp_{'a1' * 18}."),
    *("-----BEGIN RSA PRIVATE KEY-----\nMII", "https://hooks.slack.com/services/T0/B0/hunter2"),
    *([["--token", P]], ["--a", "b", "--api-key", P], ["x", f"https://u:{P}@h"]),
    *({"func_args": {"registry_token": P}}, f"https://h/x?{P}{'a1' * 8}"),
    *({"token": P}, {"training": {"a": {"apiKey": P}}}, {"password": [P]}, {"dbPassword": P}),
    *({f"https://u:{P}@h": 1}, {"a": {f"token={P}": {}}}, {"a": [{"b": f"https://u:{P}@h"}]}),
    *(
        {"env": {name: P}}
        for name in (
            *("HF_TOKEN", "WANDB_API_KEY", "KEY", "MY_KEY_2", "DB_PASSWORD"),
            *("PGPASSWORD", "BUCKET_SECRET", "SIGN_PASSWORD", "REGISTRY_TOKEN"),
        )
    ),
    *({"env": {name: P}} for name in ("AWS_ACCESS_KEY_ID", "SECRET", "TOKEN_PROD", "CREDENTIALS")),
    *({"env_vars": [{"name": "MY_KEY", "value": P}]}, {"env": {"PASSWORD": "12345678"}}),
    {"init_containers": [{"name": "a", "env": [{"name": "TOKEN", "value": P}]}]},
    {"args": [pack(f"--token={P}".encode(), WORD)]},
    {"n_" * 100_000 + "token_1": P},  # read in linear time
]


@pytest.mark.parametrize("value", HARMLESS, ids=map(str, range(len(HARMLESS))))
@pytest.mark.parametrize("name", ["parameter", ""])
def test_harmless_value_passes(value: Any, name: str) -> None:
    check_secrets(value, name)


@pytest.mark.parametrize("value", SECRET, ids=map(str, range(len(SECRET))))
def test_secret_is_refused_in_a_line_that_does_not_show_it(value: Any) -> None:
    with pytest.raises(InputError, match=r"^[^\n]*env_from_secrets[^\n]*$") as caught:
        check_secrets(value, "parameter")
    assert P not in str(caught.value)


@pytest.mark.parametrize("part", ["env_", "a-", "eyJ-", "a://{b}c "])
def test_time_to_read_a_long_name_is_linear(part: str) -> None:
    # A search from each part to the end takes an hour.
    check_secrets({part * 100_000: "x"})
