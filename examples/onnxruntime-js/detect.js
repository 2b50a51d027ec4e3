// Objects of a picture with a file of `yolofleet export --nms`, in Node.js (node.js) and in a browser (index.html).

const GREY = 114; // of the border
const rounded = (x) => (x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)); // halves to even numbers, as Python

// Return the metadata of an ONNX file: entries (field 14) of a protobuf message with a key (1) and a value (2).
export function metadataOf(bytes) {
  let at = 0;
  const varint = () => {
    let value = 0, factor = 1, byte;
    do {
      byte = bytes[at++];
      value += (byte & 127) * factor;
      factor *= 128;
    } while (byte > 127);
    return value;
  };
  const text = (length) => new TextDecoder().decode(bytes.subarray(at, (at += length)));
  while (at < bytes.length) {
    const tag = varint(), size = varint(); // a number, or the length of a field
    if (tag % 8 !== 2) continue;
    const end = at + size;
    if (tag >> 3 === 14) {
      varint(); // tag of the key
      const key = text(varint());
      varint(); // tag of the value
      if (key === "yolofleet") return JSON.parse(text(varint()));
    }
    at = end;
  }
  throw new Error("the file has no metadata of yolofleet");
}

// Return the picture { data: RGBA, width, height } as [1, 3, H, W] RGB in 0..1, with its factors and padding.
function prepared({ data, width, height }, [high, wide]) {
  const factor = Math.min(high / height, wide / width);
  const w = rounded(width * factor), h = rounded(height * factor);
  const left = Math.floor((wide - w) / 2), top = Math.floor((high - h) / 2);
  const input = new Float32Array(3 * high * wide).fill(GREY / 255);
  const places = (count, of) =>
    Array.from({ length: count }, (_, i) => {
      const place = Math.min(Math.max(((i + 0.5) * of) / count - 0.5, 0), of - 1); // bilinear, as OpenCV
      const low = Math.floor(place);
      return [low, Math.min(low + 1, of - 1), place - low];
    });
  const columns = places(w, width);
  places(h, height).forEach(([above, below, down], y) => {
    columns.forEach(([before, after, right], x) => {
      for (let c = 0; c < 3; c++) {
        const pixel = (row, column) => data[(row * width + column) * 4 + c];
        const upper = pixel(above, before) * (1 - right) + pixel(above, after) * right;
        const lower = pixel(below, before) * (1 - right) + pixel(below, after) * right;
        const value = (Math.floor(4 * upper * (1 - down)) + Math.floor(4 * lower * down) + 2) >> 2; // OpenCV's rounding
        input[(c * high + top + y) * wide + left + x] = value / 255;
      }
    });
  });
  return { input, factors: [w / width, h / height], padding: [left, top] };
}

// Return the objects of a picture: name, score, and box x1, y1, x2, y2 in pixels of the picture.
export async function detect(ort, session, metadata, picture) {
  if (!metadata.nms || !metadata.size_hw || (metadata.batch ?? 1) !== 1) {
    throw new Error("export the weights with --nms, and without --dynamic size and --batch");
  }
  const { input, factors, padding } = prepared(picture, metadata.size_hw);
  const images = new ort.Tensor("float32", input, [1, 3, ...metadata.size_hw]);
  const { data } = (await session.run({ images })).boxes; // [1, max_det, 6]; unused rows have score 0
  const found = [];
  for (let row = 0; row < data.length && data[row + 4] > 0; row += 6) {
    const box = Array.from(data.subarray(row, row + 4), (side, i) =>
      Math.min(Math.max((side - padding[i % 2]) / factors[i % 2], 0), i % 2 ? picture.height : picture.width),
    );
    found.push({ name: metadata.names[data[row + 5]], score: data[row + 4], box });
  }
  return found;
}
