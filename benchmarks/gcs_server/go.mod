module kfp-ddp/benchmarks/gcs_server

go 1.21
