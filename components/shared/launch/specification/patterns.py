"""What a name, a label, a quantity of Kubernetes may be: as patterns, and in words.

Of what stands in a pod, Kubernetes tells only when the operator makes one; so it is checked before.
"""

from typing import Annotated

from pydantic import StringConstraints

QUANTITY = r"^$|^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"
NAME = r"^$|^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$"
LABEL = r"^$|^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"
CLAIM = NAME.removeprefix("^$|")[:-1] + "(:ro)?$"
IMAGE = r"^[^\s]+$"
MOUNT = r"^/[^:]+$"
VARIABLE = r"^[-._a-zA-Z][-._a-zA-Z0-9]*$"
NODE_RANGE = r"^$|^[1-9][0-9]*:[1-9][0-9]*$"
KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"

IN_WORDS = {
    QUANTITY: "a quantity such as 500m, 4 or 16Gi",
    NAME: "a name of small letters, digits, '-' and '.'",
    LABEL: "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends",
    CLAIM: "the name of a claim, or name:ro",
    IMAGE: "the name of an image, without spaces",
    MOUNT: "an absolute path without ':'",
    VARIABLE: "the name of a variable: letters, digits, '-', '_' and '.'",
    NODE_RANGE: "the least and the most nodes as min:max, such as 2:4",
    KEY: "the key of a label or resource, such as zone or example.com/zone",
}

Name = Annotated[str, StringConstraints(pattern=NAME, min_length=1)]
Claim = Annotated[str, StringConstraints(pattern=CLAIM)]
MountPath = Annotated[str, StringConstraints(pattern=MOUNT)]
VariableName = Annotated[str, StringConstraints(pattern=VARIABLE)]
LabelKey = Annotated[str, StringConstraints(pattern=KEY)]
LabelValue = Annotated[str, StringConstraints(pattern=LABEL)]
