"""Patterns of Kubernetes' names and amounts, and how errors describe them.

Kubernetes reports errors in a pod only when an operator creates one, so they are checked before.
"""

from kfp_ddp.k8s.objects import QUANTITY

NAME = r"^$|^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
LABEL = r"^$|^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
NAMESPACE = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
SIZE = r"^(?=.*[1-9])[0-9]+(\.[0-9]+)?(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)$"
CLAIM = NAME.removeprefix("^$|")[:-1] + "(:ro)?$"
IMAGE = r"^[^\s]+$"
MOUNT = r"^/[^:]+$"
VARIABLE = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
CAPABILITY = r"^[A-Z][A-Z0-9_]*$"
KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
RESOURCE = f"^$|{KEY}"

DESCRIPTIONS = {
    QUANTITY: "a quantity such as 500m, 4 or 16Gi",
    NAME: "a name of small letters, digits, '-' and '.'",
    LABEL: "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    NAMESPACE: "a name of at most 63 small letters, digits and '-'",
    SIZE: "an amount with a unit of Kubernetes, such as 500Gi or 1Ti",
    CLAIM: "the name of a claim, or name:ro",
    IMAGE: "the name of an image, without spaces",
    MOUNT: "an absolute path without ':'",
    VARIABLE: "the name of a variable: letters, digits, '-', '_' and '.'",
    CAPABILITY: "the name of a capability of Linux without CAP_, such as IPC_LOCK",
    KEY: "the key of a label or resource, such as zone or example.com/zone",
    RESOURCE: "the name of a resource, such as rdma/hca",
}
