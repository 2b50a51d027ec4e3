// npm install && node node.js best.onnx street.jpg: print the objects as lines of JSON
import { readFile } from "node:fs/promises";
import * as ort from "onnxruntime-node";
import sharp from "sharp";
import { detect, metadataOf } from "./detect.js";

const [model, ...files] = process.argv.slice(2);
const bytes = await readFile(model);
const session = await ort.InferenceSession.create(bytes);
for (const file of files) {
  const { data, info } = await sharp(file).rotate().toColourspace("srgb").ensureAlpha().raw()
    .toBuffer({ resolveWithObject: true }); // turned as its EXIF data says
  const picture = { data, width: info.width, height: info.height };
  for (const found of await detect(ort, session, metadataOf(bytes), picture)) {
    console.log(JSON.stringify({ file, ...found }));
  }
}
