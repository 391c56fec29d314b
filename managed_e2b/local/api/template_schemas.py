"""The request bodies of templates and builds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from managed_e2b.local.api.schemas import Body, Int32
from managed_e2b.local.builds.model import Step, StepKind
from managed_e2b.local.builds.registry import Credentials
from managed_e2b.local.builds.uploads import is_hash
from managed_e2b.local.errors import ApiError, bad_request

MAX_STEPS = 1000

Name = Annotated[str, Field(max_length=256)]
Count = Annotated[Int32, Field(ge=1)]


class NewTemplate(Body):
    name: Name | None = None
    alias: Name | None = None
    tags: Annotated[list[Name], Field(default_factory=list, max_length=100)]
    cpu_count: Count | None = None
    memory_mb: Annotated[Count | None, Field(alias="memoryMB")] = None
    min_free_disk_mb: Annotated[int | None, Field(alias="minFreeDiskMb", ge=0)] = None


class TemplateStep(Body):
    type: str
    args: Annotated[list[str], Field(default_factory=list)]
    files_hash: str | None = None
    force: bool = False

    def parsed(self) -> Step:
        """Raises ApiError(400) for an instruction that nobody knows."""
        kind = self.type.upper()
        if kind not in list(StepKind):
            raise bad_request(f"command type {self.type[:32]} is not implemented")
        if self.files_hash and not is_hash(self.files_hash):
            raise bad_request("Invalid files hash")
        return Step(StepKind(kind), tuple(self.args), self.files_hash or None, self.force)


class Registry(Body):
    """Who may pull. Which of the fields there are depends on `type`."""

    type: Literal["registry", "gcp", "aws"]
    username: str | None = None
    password: Annotated[str | None, Field(repr=False)] = None
    service_account_json: Annotated[str | None, Field(repr=False)] = None


class StartBuild(Body):
    from_image: str | None = None
    from_template: str | None = None
    from_image_registry: Annotated[Registry | None, Field(repr=False)] = None
    force: bool = False
    steps: Annotated[list[TemplateStep], Field(default_factory=list, max_length=MAX_STEPS)]
    start_cmd: str | None = None
    ready_cmd: str | None = None

    def credentials(self) -> Credentials | None:
        """Raises ApiError: 400 when something is missing, 501 for AWS."""
        registry = self.from_image_registry
        if registry is None:
            return None
        match registry.type:
            case "registry" if registry.username is not None and registry.password is not None:
                return Credentials(registry.username, registry.password)
            case "gcp" if registry.service_account_json is not None:
                return Credentials("_json_key", registry.service_account_json)  # Google's name for it
            case "aws":
                text = (
                    "Logging in to AWS by its keys is not available on the local server: pass the user AWS and the "
                    "password that `aws ecr get-login-password` prints, as of a general registry"
                )
                raise ApiError(501, text, headers={"Should-Retry": "false"})
        raise bad_request("fromImageRegistry: the credentials are not complete")


class UpdateTemplate(Body):
    public: bool | None = None


class AssignTags(Body):
    target: Name
    tags: Annotated[list[Name], Field(max_length=100)]


class DeleteTags(Body):
    name: Name
    tags: Annotated[list[Name], Field(max_length=100)]
