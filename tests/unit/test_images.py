"""Images of prompts: what is taken, what is refused with its row, and that a prompt is known by its images' content."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import ExifTags, Image

from bapo.core.errors import ConfigError, ContractError, StorageError
from bapo.core.json_values import from_map, to_map
from bapo.core.types import Prompt
from bapo.runtime.run_directory.images import ImageFiles, media_type
from bapo.runtime.vision import decoded
from bapo.tasks.base import make_prompt
from bapo.tasks.dataset import DatasetTask
from bapo.tasks.images import MAX_IMAGE_BYTES, Images, digest_of, read_image
from tests.support.tasks import maker

make_task = maker("dataset")


def file_of(color: str, kind: str = "PNG", size: tuple[int, int] = (8, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, format=kind)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says how large it is and has next to nothing in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(b"\0" * 1000)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


RED, BLUE = file_of("red"), file_of("blue", "JPEG")


def test_images_come_as_bytes_paths_maps_and_pil_images(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    for value in (RED, "red.png", {"bytes": RED, "path": "elsewhere.png"}, {"bytes": None, "path": "red.png"}):
        assert read_image(value, "row 1", tmp_path) == RED
    assert read_image(BLUE, "row 1") == BLUE
    again = Image.open(io.BytesIO(read_image(Image.open(io.BytesIO(RED)), "row 1")))
    assert (again.format, again.getpixel((0, 0))) == ("PNG", (255, 0, 0))


RESOLUTION = b"\x01\x1a\0\x05", b"\x01\x1a\0\x02"
"""An entry of EXIF data: the tag, and its type: a fraction, or else a text, which Pillow reads but cannot write."""


def photo(orientation: int, kind: str = "JPEG", damage: tuple[bytes, bytes] = (b"", b"")) -> bytes:
    """A photo as its camera stores it, upside down or on its side: red on the left and white on the right, 32 x 16."""
    image = Image.new("RGB", (32, 16), "white")
    image.paste("red", (0, 0, 16, 16))
    turned = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.XResolution] = orientation, 72.0
    buffer = io.BytesIO()
    image.transpose(turned[orientation]).save(buffer, format=kind, exif=exif.tobytes().replace(*damage))
    return buffer.getvalue()


def left_and_right(image: Any) -> tuple[Any, Any]:
    """The size of an image, and whether two of its pixels are red."""
    width, height = image.size
    return image.size, [image.getpixel((x, height // 2))[1] < 50 for x in (width // 4, 3 * width // 4)]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [3, 6])
def test_a_photo_is_shown_to_the_model_as_to_a_person(kind: str, orientation: int, tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    (path := tmp_path / "photo").write_bytes(photo(orientation, kind))
    of_file, of_pil = read_image(path, "row 1"), read_image(Image.open(path), "row 1")
    assert (of_file, Image.open(io.BytesIO(of_pil)).size) == (path.read_bytes(), (32, 16)), "the file itself is kept"
    for shown in (decoded(of_file), decoded(of_pil), load_image(str(path))):
        assert left_and_right(shown) == ((32, 16), [True, False])


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_data_that_are_damaged_cost_no_image_and_no_orientation_that_can_be_read(kind: str) -> None:
    for damage, size in ((RESOLUTION, (32, 16)), ((b"MM\0*", b"XX\0*"), (16, 32))):
        assert decoded(read_image(photo(6, kind, damage), "row 1")).size == size


def test_gray_of_16_bits_is_scaled_to_8() -> None:
    gray = Image.new("I;16", (4, 1))
    for x, value in enumerate((0, 257, 128 * 257, 65535)):
        gray.putpixel((x, 0), value)
    shown = decoded(read_image(gray, "row 1"))
    assert [shown.getpixel((x, 0)) for x in range(4)] == [(0,) * 3, (1,) * 3, (128,) * 3, (255,) * 3]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Image.new("F", (2, 2)), "mode F has no value that is known to be white"),
        (b"GIF89a" + bytes(20), "not a readable PNG or JPEG"),
        (file_of("red", "GIF"), "not a readable PNG or JPEG"),
        (RED[:-20], "broken or truncated"),
        (file_of("blue", "JPEG", (64, 64))[:-30], "broken or truncated"),
        (png_header(5000, 5000), "25000000|5000 x 5000 pixels"),
        (png_header(50_000, 50_000), "not a readable PNG or JPEG|pixels"),
        (RED + bytes(MAX_IMAGE_BYTES), "bytes, more than the limit"),
        ("gone.png", "cannot be read"),
        ({"path": None, "bytes": None}, "needs `bytes` or `path`"),
        (7, "got int"),
    ],
    ids=["floats", "no image", "gif", "png cut", "jpeg cut", "large", "bomb", "heavy", "no file", "no keys", "number"],
)
def test_anything_else_is_refused_with_its_row(value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^data.jsonl row 7: .*({reason})"):
        read_image(value, "data.jsonl row 7")


def test_the_content_of_an_image_is_part_of_the_prompt() -> None:
    images = Images()
    red, blue = images.add(RED, "row 1"), images.add(BLUE, "row 2")
    assert (red, images.image(red)) == (digest_of(RED), RED)
    plain, one, other = (make_prompt("t", "<image> 1+1?", {}, images=found) for found in ([], [red], [blue]))
    assert len({plain.prompt_id, one.prompt_id, other.prompt_id}) == 3
    assert one == make_prompt("t", "<image> 1+1?", {}, images=[red])


def test_a_prompt_without_images_has_the_id_and_the_bytes_of_before() -> None:
    prompt = make_prompt("t", "1+1?", {"answer": "2"})
    assert prompt.prompt_id == "81d73212381dd828"
    fields = {"prompt_id": prompt.prompt_id, "text": "1+1?", "task": "t", "answer": {"answer": "2"}}
    assert to_map(prompt) == fields
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt)) == fields


def test_digests_travel_and_nothing_else_is_taken_for_one() -> None:
    prompt = make_prompt("t", "<image> and <image>", {}, images=[digest_of(RED), digest_of(BLUE)])
    assert from_map(to_map(prompt), Prompt, "prompt") == prompt
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt) == prompt
    for wrong in (["../" + "a" * 61], ["A" * 64], ["a" * 64 + "\n"], "a" * 64, [7], ["a" * 64] * 65):
        with pytest.raises(ContractError):
            from_map(to_map(prompt) | {"images": wrong}, Prompt, "prompt")


def test_there_is_one_place_for_each_image() -> None:
    with pytest.raises(ConfigError, match="2 <image> for 1 images"):
        make_prompt("t", "<image> <image>", {}, images=[digest_of(RED)])
    assert make_prompt("t", "what does <image> do in HTML?", {}).images == ()


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_a_file_name_images_by_path_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "pictures" / "blue.jpg").write_bytes(BLUE)
    path = jsonl(
        tmp_path / "train.jsonl",
        {"prompt": "<image>?", "answer": "red", "images": ["pictures/red.png"]},
        {"prompt": "<image> or <image>?", "answer": "no", "images": ["pictures/blue.jpg", "pictures/red.png"]},
        {"prompt": "<image>?", "answer": "blue", "images": "pictures/blue.jpg"},
        {"prompt": "no image?", "answer": "no", "images": []},
        {"prompt": "none?", "answer": "no"},
    )
    task = make_task(path=path, images_column="images")
    red, blue = digest_of(RED), digest_of(BLUE)
    assert [prompt.images for prompt in task.prompts("train")] == [(red,), (blue, red), (blue,), (), ()]
    assert task.image(blue) == BLUE


def test_parquet_files_hold_images_as_hugging_face_writes_them(tmp_path: Path) -> None:
    rows = [{"problem": "<image>?", "answer": "1", "images": [{"bytes": RED, "path": None}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    path = str(tmp_path / "train.parquet")
    (prompt,) = make_task(path=path, images_column="images", prompt_column="problem").prompts("train")
    assert prompt.images == (digest_of(RED),)


def test_messages_of_parts_become_text_with_places_for_images(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    content = [{"type": "image"}, {"type": "text", "text": "Which color?"}]
    row = {"prompt": [{"role": "user", "content": content}], "answer": "red", "image": "red.png"}
    task = make_task(path=jsonl(tmp_path / "train.jsonl", row), images_column="image", message_format="{content}")
    assert task.prompts("train")[0].text == "<image>Which color?"


def test_an_image_is_a_question_without_words_and_an_empty_part_is_none(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    alone = jsonl(tmp_path / "alone.jsonl", {"prompt": "", "answer": "red", "image": "red.png"})
    task = make_task(path=alone, images_column="image", question_format="<image>{prompt}")
    assert [prompt.images for prompt in task.prompts("train")] == [(digest_of(RED),)]
    seen, empty = ([{"role": "user", "content": [part]}] for part in ({"type": "image"}, {"type": "text", "text": ""}))
    rows = {"prompt": seen, "answer": "red", "image": ["red.png"]}, {"prompt": empty, "answer": "red", "image": []}
    task = make_task(path=jsonl(tmp_path / "parts.jsonl", *rows), images_column="image", system_prompt="Look.")
    with pytest.raises(ConfigError, match="row 2: column 'prompt' must be text or messages"):
        task.prompts("train")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "?", "images": ["red.png"]}, "row 1: the prompt has 0 <image> for 1 images"),
        ({"prompt": "<image>?", "images": []}, "row 1: the prompt has 1 <image> for 0 images"),
        ({"prompt": "<image>?", "images": ["gone.png"]}, "row 1: column 'images': the image .*gone.png cannot be read"),
    ],
)
def test_a_row_whose_images_do_not_fit_is_named(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    task: DatasetTask = make_task(
        path=jsonl(tmp_path / "train.jsonl", {"answer": "red", **row}), images_column="images"
    )
    with pytest.raises(ConfigError, match=reason):
        task.prompts("train")


def test_a_question_is_held_out_by_its_text_and_images_and_not_by_its_answer(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "blue.png").write_bytes(file_of("blue"))
    text = "<image>What is it?"
    train = jsonl(
        tmp_path / "train.jsonl",
        {"prompt": text, "images": "red.png", "answer": "142"},
        {"prompt": text, "images": "blue.png", "answer": "1"},
    )
    test = jsonl(tmp_path / "test.jsonl", {"prompt": text, "images": "red.png", "answer": "142.0"})
    task = make_task(path=train, held_out={"test": test}, images_column="images")
    assert [prompt.answer["answer"] for prompt in task.prompts("train")] == ["1"]


def test_a_reward_that_reads_all_columns_gets_no_image_files(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(completions, images=None, **columns):\n    return columns\n")
    row = {"images": [{"bytes": RED, "path": None}], "prompt": "<image>What?", "answer": "9", "source": "own"}
    pq.write_table(pa.Table.from_pylist([row]), path := str(tmp_path / "train.parquet"))
    reward = f"trl:{tmp_path / 'my_rewards.py'}:score"
    (prompt,) = make_task(path=path, images_column="images", reward=reward).prompts("train")
    assert prompt.answer["source"] == "own"
    assert "images" not in prompt.answer


def test_a_run_keeps_each_image_once_by_its_content(tmp_path: Path) -> None:
    files = ImageFiles(tmp_path / "images")
    red, blue = digest_of(RED), digest_of(BLUE)
    source = {red: RED, blue: BLUE}
    prompts = [
        make_prompt("t", "<image>", {}, images=[red]),
        make_prompt("t", "<image><image>", {}, images=[red, blue]),
    ]
    assert (files.keep(prompts, source.__getitem__), files.keep(prompts, source.__getitem__)) == (2, 0)
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted([red, blue])
    assert (files.read(blue), media_type(BLUE), media_type(RED)) == (BLUE, "image/jpeg", "image/png")


def test_an_image_that_was_changed_or_is_gone_is_not_read(tmp_path: Path) -> None:
    files, red = ImageFiles(tmp_path), digest_of(RED)
    with pytest.raises(ContractError):
        files.write(red, BLUE)
    with pytest.raises(StorageError):
        files.read(red)
    (tmp_path / red).write_bytes(BLUE)
    with pytest.raises(ContractError, match="has the digest"):
        files.read(red)
    with pytest.raises(ContractError):
        files.read("../config.toml")
